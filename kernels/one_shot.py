"""OneShot: the sum over the GPUs of one host in one kernel, for what is small: each reads all the others' memory.

NCCL moves data in rounds, which for a decode step's few kilobytes cost more than the bytes. Here each GPU writes its
part where all can read it, waits until all have, and adds up all parts in rank order, so that every rank has the same
bits. torch's symmetric memory has the buffers, the barrier and the kernel; NVLink (or PCIe with peer access) is needed.
"""

from __future__ import annotations

import logging

import torch
from torch import distributed

logger = logging.getLogger(__name__)

_ALIGNED = 16  # bytes that the kernel reads at once


class OneShot:
    """Owns this rank's shared buffer. Sums of one rank run one after another, on one stream."""

    def __init__(self, buffer: torch.Tensor, group_name: str) -> None:
        self._buffer = buffer
        self._group_name = group_name

    @classmethod
    def make(cls, group: distributed.ProcessGroup, device: torch.device, *, num_bytes: int) -> OneShot | None:
        """Share num_bytes of every rank with all, which all ranks must ask for at once; None: these GPUs cannot."""
        try:
            from torch.distributed import _symmetric_memory as symmetric_memory

            buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
            symmetric_memory.rendezvous(buffer, group)
        except (ImportError, RuntimeError) as error:
            logger.info("one_shot=off reason=%r", str(error).strip().partition("\n")[0])
            return None
        return cls(buffer, group.group_name)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether sum() has room for x, and gains by it. Host-side facts only."""
        num_bytes = x.nbytes
        return 0 < num_bytes <= self._buffer.nbytes and num_bytes % _ALIGNED == 0 and x.is_contiguous()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x, of one shape, in a tensor of its own; fp32 inside. Graph-safe."""
        shared = self._buffer.view(x.dtype)[: x.numel()].view_as(x)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", self._group_name)
