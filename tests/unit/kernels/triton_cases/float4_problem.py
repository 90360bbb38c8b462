"""Random matrices of 4-bit floats, shared by the specification's tests, the interpreter's cases and the GPU tests."""

from __future__ import annotations

import torch

from kernels.e2m1 import dequantize_mxfp4, dequantize_nvfp4
from kernels.linear.float4 import Float4Weight, make_float4_weight
from kernels.linear.planes import Float4Planes, make_float4_planes

KINDS = ("mxfp4", "nvfp4")


def float4_problem(
    n: int, k: int, kind: str, *, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Float4Weight, torch.Tensor]:
    """A weight whose outputs have factors of their own, and the [N, K] float64 matrix that it means."""
    packed, scales, factors, dense = _stored(n, k, kind, device)
    return make_float4_weight(packed, scales, factors, dtype), dense


def planes_problem(n: int, k: int, kind: str, *, device: str = "cpu") -> tuple[Float4Planes, torch.Tensor]:
    """The same weight in planes, and the [N, K] float64 matrix that it means."""
    *stored, dense = _stored(n, k, kind, device)
    return make_float4_planes(*stored), dense


def _stored(n: int, k: int, kind: str, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(n * k)
    options = {"device": device, "generator": generator}
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, **options)
    factors = torch.rand(n, **options).add(0.5)
    if kind == "mxfp4":
        # some far below the largest of their row
        scales = torch.randint(112, 121, (n, k // 32), dtype=torch.uint8, **options)
        dense = dequantize_mxfp4(packed, scales)
    else:
        scales = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8, **options).view(torch.float8_e4m3fn)
        factors /= 10_000
        dense = dequantize_nvfp4(packed, scales, 1.0)
    return packed, scales, factors, dense.double() * factors.double()[:, None]
