"""The process group of the ranks that share a model: how they meet, and agree on what loading needs. Imports torch."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
from torch import distributed

from models.parallel import TensorParallel

# Loading a share of the weights may take one rank longer than another: from one disk, after a download
_PATIENCE = timedelta(hours=1)


def join_ranks(*, rank: int, size: int, rendezvous: str, device: torch.device) -> TensorParallel:
    """Meet the other ranks of this host. Blocks until all are there; once per process.

    rendezvous: path of a file that is not there yet, the same for all. Nothing is bound but on the loopback.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # the only way to say it to these libraries
        os.environ.setdefault(variable, loopback)
    is_cuda = device.type == "cuda"
    distributed.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=_PATIENCE,
        device_id=device if is_cuda else None,
    )
    group = distributed.group.WORLD
    assert group is not None
    return TensorParallel(rank, size, group)


def agree(tp: TensorParallel, numbers: list[float], device: torch.device) -> list[float]:
    """Return rank 0's numbers on every rank. Blocks and syncs."""
    return tp.broadcast(torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()


def least(tp: TensorParallel, number: int, device: torch.device) -> int:
    """Return the smallest of every rank's numbers, once all are there. Blocks and syncs."""
    if tp.group is None:
        return number
    x = torch.tensor([number], dtype=torch.int64, device=device)
    distributed.all_reduce(x, op=distributed.ReduceOp.MIN, group=tp.group)
    return int(x.item())
