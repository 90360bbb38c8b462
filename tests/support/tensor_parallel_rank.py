"""One rank of test_tensor_parallel: runs each checkpoint split over the ranks and saves its logits."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

from kernels.all_reduce.reference import sum_add_rms_norm, sum_parts
from kernels.elementwise.reference import FP8
from models.config.model_config import ModelConfig
from models.parallel import TensorParallel
from tests.support.models_harness import PagedRunner, load

# The first step has 7 rows, the others fewer than MAX_SMALL_ROWS
MAX_SMALL_ROWS = 4
PROMPT = [3, 90, 17, 4, 55, 8, 8, 61, 96, 0, 42]


def run_rank(
    rank: int,
    size: int,
    store_file: Path,
    folders: list[Path],
    is_expert_parallel: bool = False,
    load_model: Callable[[Path, TensorParallel], torch.nn.Module] = load,
) -> None:
    """Run in a process of its own. Raises AssertionError where a collective is not as its docstring says."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=size)
    tp = TensorParallel(rank, size, distributed.group.WORLD)
    check_collectives(tp)
    sums = GatheredSums(tp)
    tp = dataclasses.replace(tp, one_shot_all_reduce=sums, is_expert_parallel=is_expert_parallel)
    for folder in folders:
        config = ModelConfig.from_folder(folder)
        runner = PagedRunner(load_model(folder, tp), config, tp_size=size, dtype=pool_dtype(folder))
        row = runner.add_row()
        logits = runner.step([(row, PROMPT[:7])]) + runner.step([(row, PROMPT[7:8])]) + runner.step([(row, PROMPT[8:])])
        torch.save(torch.cat(logits), folder / f"logits-{size}-{rank}.pt")
    assert sums.num_fused > 0
    distributed.destroy_process_group()


class GatheredSums:
    """OneShotAllReduce by its specification, from the parts of all."""

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp
        self.num_fused = 0

    def takes(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= MAX_SMALL_ROWS

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum_parts(self._tp.all_gather(x[None], 0)))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_fused += 1
        return sum_add_rms_norm(self._tp.all_gather(x[None], 0), residual, weight, eps)


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
    assert torch.equal(tp.sum_late(mine.clone()), sum(everyone))
