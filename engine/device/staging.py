"""Staging: the one way from the host's values to the device. Imports torch; knows nothing of requests.

On CUDA values pass through pinned memory, so a copy is queued behind the steps in flight and the host goes on; from
pageable memory a copy above 64 KiB waits for all of them. Two buffers take turns by step: with two steps in flight, the
older one is read back, hence done, before its buffer is written again.
"""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 16  # bytes


class Staging:
    """Two pinned buffers of num_bytes each. One thread, one stream."""

    def __init__(self, device: torch.device, *, num_bytes: int) -> None:
        self._device = device
        self._turn = 0
        self._used = 0
        self._buffers: list[torch.Tensor] = []
        if device.type == "cuda":
            self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def begin_step(self) -> None:
        """Take the other buffer: values of the step before the last may be overwritten from now on."""
        self._turn ^= 1
        self._used = 0

    def send(self, values: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy values to the device, into the front of `out` if given; returns the tensor of their shape and dtype."""
        source = self._stage(values)
        if out is None:
            return source.to(self._device, non_blocking=True)
        return out[: source.shape[0]].copy_(source, non_blocking=True)

    def send_large(self, values: np.ndarray) -> torch.Tensor:
        """Copy values that may exceed a step's share to the device, queued as send() does."""
        source = torch.from_numpy(values)
        if self._device.type == "cuda":
            # pinned blocks come from torch's caching host allocator, which reuses one only when copies of it are done
            source = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)
        return source.to(self._device, non_blocking=True)

    def _stage(self, values: np.ndarray) -> torch.Tensor:
        if not self._buffers or self._used + values.nbytes > self._buffers[0].shape[0]:
            return torch.from_numpy(values)  # rare on CUDA: more than a step's share, and the host waits
        staged = self._buffers[self._turn][self._used : self._used + values.nbytes]
        self._used += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
        staged.numpy()[:] = values.reshape(-1).view(np.uint8)
        return staged.view(torch.from_numpy(values).dtype).view(values.shape)
