"""A dense product, by whichever kernel measured fastest for its size: a skinny GEMM, a GEMM of ours, or cuBLAS."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from kernels.ops import HAS_TRITON, has_pdl

if HAS_TRITON:
    from kernels.triton_gemv import GemvScratch, can_gemv, gemv

try:
    from kernels.gluon_gemm import gemm, gemm_cut

    HAS_GLUON = True
except ImportError:  # no Triton, or another version
    HAS_GLUON = False


class DenseLinear:
    """x @ w.T + bias. Owns the scratch of the skinny GEMM: one stream."""

    def __init__(self) -> None:
        self._scratch: GemvScratch | None = None

    def __call__(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K]; w: [N, K]; bias: [N] or None; returns [T, N]."""
        if HAS_TRITON and can_gemv(x, w):
            if self._scratch is None:
                self._scratch = GemvScratch.allocate(x.device)
            return gemv(x, w, bias, self._scratch, pdl=has_pdl(x.device))
        if HAS_GLUON and bias is None and x.is_cuda and _is_hopper(x.device):
            cut = gemm_cut(x, w)
            if cut is not None:
                return gemm(x, w, cut=cut, pdl=True)
        return functional.linear(x, w, bias)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """True if the device is of the generation that the GEMM was written for."""
    return torch.cuda.get_device_capability(device)[0] == 9
