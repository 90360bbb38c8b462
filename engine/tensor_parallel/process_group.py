"""The process group of the ranks that share a model: how they meet, and agree on what loading needs. Imports torch."""

from __future__ import annotations

import dataclasses
import os
import sys
from datetime import timedelta

import torch
from torch import distributed

from engine.tensor_parallel.small_sums import least_of, share_small_sums
from models.parallel import TensorParallel

# Loading a share of the weights may take one rank longer than another: from one disk, after a download
_PATIENCE = timedelta(hours=1)


def join_ranks(
    *, rank: int, size: int, rendezvous: str, device: torch.device, hidden_size: int | None = None
) -> TensorParallel:
    """Meet the other ranks of this host. Blocks until all are there; once per process.

    rendezvous: path of a file that is not there yet, the same for all. Nothing is bound but on the loopback.
    hidden_size: of rows of 16-bit values, summed in kernels of our own where the GPUs can; None: NCCL makes all sums.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # the only way to say it to these libraries
        os.environ.setdefault(variable, loopback)
    # Else our end may wait for ever for a thread of NCCL's group, which seems to ask for the rendezvous once it is gone
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
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
    tp = TensorParallel(rank, size, group)
    if not is_cuda or hidden_size is None:
        return tp
    small_sums = share_small_sums(group, device, width=hidden_size)
    return dataclasses.replace(tp, small_sums=small_sums)


def leave_ranks() -> None:
    """Leave the group, if there is one, once the others are gone.

    NCCL's ends with this process, which can load no other split model: the second to be loaded hung.
    """
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def agree(tp: TensorParallel, numbers: list[float], device: torch.device) -> list[float]:
    """Return rank 0's numbers on every rank. Blocks and syncs."""
    return tp.broadcast(torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()


def least(tp: TensorParallel, number: int, device: torch.device) -> int:
    """Return the smallest of every rank's numbers, once all are there. Blocks and syncs."""
    return number if tp.group is None else least_of(tp.group, number, device)
