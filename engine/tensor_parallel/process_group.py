"""join_ranks() and the process group of tensor-parallel ranks, and their shared memory for one-shot all-reduce.

Imports torch. The ranks join the group once per process, agree on measured numbers while loading (agree(), least()),
and leave it at the end. share_one_shot_all_reduce() maps memory that all ranks of one host can write, for the kernel in
kernels/all_reduce/triton.py. Either all ranks use this kernel, or all use NCCL: they agree on each step of the set-up,
since an operation that only some ranks begin would never end.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from datetime import timedelta

import torch
from torch import distributed

from engine.interface.errors import first_line
from kernels.dispatch import HAS_TRITON, has_pdl
from models.parallel import OneShotAllReduce, TensorParallel

if HAS_TRITON:
    from kernels.all_reduce.triton import MAX_PUSHED_BYTES, TritonOneShotAllReduce, clear_inbox, inbox_shape

logger = logging.getLogger(__name__)

# False in one rank: all ranks use NCCL only. For measurements
IS_ENABLED = True
_MAX_RANKS = 8  # GPUs on one NVSwitch, and the kernel's limit
_ALIGNED = 8  # values
# One rank may load its weights much more slowly than another: from one disk, after a download
_PATIENCE = timedelta(hours=1)


def least_of(group: distributed.ProcessGroup, number: int, device: torch.device) -> int:
    """Return the smallest of all ranks' numbers. Blocks until all ranks call it, and syncs."""
    x = torch.tensor([number], dtype=torch.int64, device=device)
    distributed.all_reduce(x, op=distributed.ReduceOp.MIN, group=group)
    return int(x.item())


def share_one_shot_all_reduce(
    group: distributed.ProcessGroup, device: torch.device, *, width: int, max_pushed_bytes: int | None = None
) -> OneShotAllReduce | None:
    """Map each rank's inbox into every rank's memory; return None on all ranks if one rank cannot. Blocks and syncs.

    width: columns of the widest rows. max_pushed_bytes: largest sum per rank; None: the size where NCCL is faster.
    """
    size = distributed.get_world_size(group)
    can_share = _can_share(size, device) and width % _ALIGNED == 0
    num_programs = torch.cuda.get_device_properties(device).multi_processor_count if can_share else 0
    num_programs = least_of(group, num_programs, device)
    if num_programs == 0:
        logger.info("NCCL computes all sums over ranks")
        return None
    shape = inbox_shape(num_ranks=size, width=width)
    own = _allocate(math.prod(shape), device)
    if least_of(group, int(own is not None), device) == 0 or own is None:  # before any rank waits in rendezvous()
        logger.info("NCCL computes all sums over ranks")
        return None
    shared = _share_inboxes(group, own, shape)
    is_shared = least_of(group, int(shared is not None), device) == 1  # from here on all inboxes are cleared
    if shared is None or not is_shared:
        logger.info("NCCL computes all sums over ranks")
        return None
    memory, inboxes = shared
    logger.info("one-shot all-reduce sums small tensors ranks=%d width=%d programs=%d", size, width, num_programs)
    return TritonOneShotAllReduce(
        inboxes,
        memory=memory,
        rank=distributed.get_rank(group),
        width=width,
        num_programs=num_programs,
        device=device,
        max_pushed_bytes=MAX_PUSHED_BYTES if max_pushed_bytes is None else max_pushed_bytes,
        pdl=has_pdl(device),
    )


def unconnected_one_shot_all_reduce(size: int, device: torch.device, *, width: int) -> OneShotAllReduce | None:
    """Return the likely result of share_one_shot_all_reduce() without peers, to precompile kernels."""
    if not _can_share(size, device) or width % _ALIGNED != 0:
        return None
    inboxes = [torch.empty(_ALIGNED, dtype=torch.int16, device=device) for _ in range(size)]
    return TritonOneShotAllReduce(
        inboxes, memory=None, rank=0, width=width, num_programs=1, device=device, pdl=has_pdl(device)
    )


def join_ranks(
    *, rank: int, size: int, rendezvous: str, device: torch.device, hidden_size: int | None = None
) -> TensorParallel:
    """Join the process group with the other ranks of this host. Blocks until all have joined; once per process.

    rendezvous: path of a file that does not exist yet, equal for all ranks. Sockets are bound on the loopback only.
    hidden_size: columns of 16-bit rows, for the one-shot all-reduce where GPUs support it; None: NCCL only.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # these libraries read no other setting
        os.environ.setdefault(variable, loopback)
    # Otherwise this process's exit may wait without end for a thread of NCCL's group, which seems to query the
    # rendezvous after it is gone
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
    one_shot_all_reduce = share_one_shot_all_reduce(group, device, width=hidden_size)
    return dataclasses.replace(tp, one_shot_all_reduce=one_shot_all_reduce)


def leave_ranks() -> None:
    """Leave the group, if any, after the other ranks have exited.

    A group of NCCL lasts until this process exits, which therefore cannot load another split model: a second one hung.
    """
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def agree(tp: TensorParallel, numbers: list[float], device: torch.device) -> list[float]:
    """Return rank 0's numbers on every rank. Blocks and syncs."""
    return tp.broadcast(torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()


def least(tp: TensorParallel, number: int, device: torch.device) -> int:
    """Return the smallest of all ranks' numbers. Blocks until all ranks call it, and syncs."""
    return number if tp.group is None else least_of(tp.group, number, device)


def _can_share(size: int, device: torch.device) -> bool:
    """Return True if this rank's GPU can access those of the other ranks, which are the first `size` of this host."""
    if not (IS_ENABLED and HAS_TRITON and device.type == "cuda" and 1 < size <= _MAX_RANKS):
        return False
    others = [index for index in range(size) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _allocate(num_values: int, device: torch.device) -> torch.Tensor | None:
    """Return this rank's inbox, int16, in shareable memory; None if it cannot be allocated."""
    # Only torch reads this variable. Without it torch also sets up multicast over NVLink, which no kernel here uses
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        return symmetric_memory.empty(num_values, dtype=torch.int16, device=device)
    except (ImportError, RuntimeError) as error:
        _log_refusal(error)
        return None


def _share_inboxes(
    group: distributed.ProcessGroup, own: torch.Tensor, shape: tuple[int, ...]
) -> tuple[object, list[torch.Tensor]] | None:
    """Return the mapping's owner and all inboxes in rank order, this rank's cleared; None if the driver refuses."""
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        size, rank = distributed.get_world_size(group), distributed.get_rank(group)
        shared = symmetric_memory.rendezvous(own, group)
        own = own.view(shape)
        clear_inbox(own)
        torch.cuda.synchronize(own.device)
        # Depending on its version, torch counts from the tensor or from its segment; the offset is equal on all ranks
        start = own.data_ptr() - shared.get_buffer(rank, (1,), torch.int16).data_ptr()
        inboxes = [shared.get_buffer(peer, shape, torch.int16, start // own.itemsize) for peer in range(size)]
        inboxes[rank] = own
        return shared, inboxes
    except (ImportError, RuntimeError) as error:
        _log_refusal(error)
        return None


def _log_refusal(error: Exception) -> None:
    logger.info("one-shot all-reduce is not available reason=%r", first_line(error))
