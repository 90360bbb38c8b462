"""One of the ranks of test_lora: runs a checkpoint and its adapters split over all, and saves the logits."""

from pathlib import Path

import torch
from torch import distributed

from kernels.ops import LoraTokens
from models.config.model_config import ModelConfig
from models.lora.adapter import Adapter
from models.lora.linear import AdapterStack
from models.parallel import TensorParallel
from tests.support.models_harness import CPU, PagedRunner, load

PROMPT = torch.randint(0, 97, (29,), generator=torch.Generator().manual_seed(7)).tolist()


def run_rank(rank: int, size: int, store_file: Path, checkpoint: Path, folders: list[Path]) -> None:
    """Run in a process of its own."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=size)
    tp = TensorParallel(rank, size, distributed.group.WORLD)
    tokens = LoraTokens(num_adapters=len(folders), max_tokens=256, device=CPU)
    stack = AdapterStack([Adapter(folder.name, folder) for folder in folders], tokens)
    model = load(checkpoint, tp, adapters=stack)
    runner = PagedRunner(model, ModelConfig.from_folder(checkpoint), tp_size=size, lora_tokens=tokens)
    rows = [runner.add_row(owner) for owner in range(len(folders) + 1)]
    torch.save(torch.cat(runner.step([(row, PROMPT) for row in rows])), checkpoint / f"logits-{rank}.pt")
    distributed.destroy_process_group()
