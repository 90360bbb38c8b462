"""A dense product, by whichever kernel measured fastest for its size: a skinny GEMM, a GEMM of ours, or cuBLAS."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from kernels.ops import HAS_TRITON, has_pdl

if HAS_TRITON:
    from kernels.gemm_configs import GemmScratch, gemm_config
    from kernels.triton_gemm import can_gemm, gemm
    from kernels.triton_gemv import GemvScratch, can_gemv, gemv


class DenseLinear:
    """x @ w.T + bias. Owns the scratch of our kernels: one stream."""

    def __init__(self) -> None:
        self._gemv_scratch: GemvScratch | None = None
        self._gemm_scratch: GemmScratch | None = None

    def __call__(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; w: [N, K]; bias: [N] or None; returns [T, N]."""
        if HAS_TRITON and can_gemv(x, w):
            if self._gemv_scratch is None:
                self._gemv_scratch = GemvScratch.allocate(x.device)
            return gemv(x, w, bias, self._gemv_scratch, pdl=has_pdl(x.device))
        if HAS_TRITON and can_gemm(x, w) and is_hopper(x.device):
            num_sms = _num_sms(x.device)
            config = gemm_config(num_rows=x.shape[0], n=w.shape[0], k=w.shape[1], num_sms=num_sms)
            if config is not None:
                if self._gemm_scratch is None:
                    self._gemm_scratch = GemmScratch.allocate(x.device, num_sms=num_sms)
                return gemm(x, w, bias, self._gemm_scratch, config=config, pdl=True)
        return functional.linear(x, w, bias)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """True if the device is of the generation that the GEMM was written for."""
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
