"""One rank of test_tensor_parallel: runs each checkpoint split over the ranks and saves its logits.

Usage: python -m tests.unit.models.tensor_parallel_rank RANK SIZE STORE_FILE CHECKPOINT...
"""

import sys
from pathlib import Path

import torch
from torch import distributed

from kernels.kv_write import FP8
from models.config import ModelConfig
from models.parallel import TensorParallel
from tests.unit.models.harness import PagedRunner, load

PROMPT = [3, 90, 17, 4, 55, 8, 8, 61, 96, 0, 42]


def main(rank: int, size: int, store_file: str, folders: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=size)
    tp = TensorParallel(rank, size, distributed.group.WORLD)
    check_collectives(tp)
    for folder in map(Path, folders):
        runner = PagedRunner(load(folder, tp), ModelConfig.from_folder(folder), tp_size=size, dtype=pool_dtype(folder))
        row = runner.add_row()
        logits = runner.step([(row, PROMPT[:7])]) + runner.step([(row, PROMPT[7:8])]) + runner.step([(row, PROMPT[8:])])
        torch.save(torch.cat(logits), folder / f"logits-{size}-{rank}.pt")
    distributed.destroy_process_group()


def pool_dtype(folder: Path) -> torch.dtype:
    """What the pool holds: the folder's name says it."""
    return FP8 if folder.name.startswith("fp8_pool") else torch.float32


def check_collectives(tp: TensorParallel) -> None:
    """Each collective does what its docstring says."""
    mine = torch.arange(6.0).view(2, 3) + 10 * tp.rank
    everyone = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(tp.size)]
    for dim in (0, 1, -1):
        assert torch.equal(tp.all_gather(mine, dim), torch.cat(everyone, dim))
    assert torch.equal(tp.broadcast(mine.clone(), src=1), everyone[1])
    assert torch.equal(tp.all_reduce(mine.clone()), sum(everyone))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
