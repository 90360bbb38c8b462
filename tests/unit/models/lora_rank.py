"""One of two ranks of test_lora: runs a checkpoint and its adapters split over both, and saves the logits.

Usage: python -m tests.unit.models.lora_rank STORE_FILE CHECKPOINT RANK ADAPTER...
"""

import sys
from pathlib import Path

import torch
from torch import distributed

from kernels.ops import LoraTokens
from models.config import ModelConfig
from models.lora.adapter import Adapter
from models.lora.stack import AdapterStack
from models.parallel import TensorParallel
from tests.unit.models.harness import CPU, PagedRunner, load

PROMPT = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(7)).tolist()


def main(store_file: str, checkpoint: Path, rank: int, folders: list[Path]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=2)
    tp = TensorParallel(rank, 2, distributed.group.WORLD)
    tokens = LoraTokens(num_adapters=len(folders), max_tokens=256, device=CPU)
    stack = AdapterStack([Adapter(folder.name, folder) for folder in folders], tokens)
    model = load(checkpoint, tp, adapters=stack)
    runner = PagedRunner(model, ModelConfig.from_folder(checkpoint), tp_size=2, lora_tokens=tokens)
    rows = [runner.add_row(owner) for owner in range(len(folders) + 1)]
    torch.save(torch.cat(runner.step([(row, PROMPT) for row in rows])), checkpoint / f"logits-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), [Path(folder) for folder in sys.argv[4:]])
