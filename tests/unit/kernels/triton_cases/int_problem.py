"""Random integer weights, shared by the specification's tests, the interpreter's cases and the GPU tests."""

from __future__ import annotations

import torch

from kernels.linear.reference import IntWeight, make_int_weight


def int_problem(
    n: int,
    k: int,
    *,
    bits: int = 4,
    group_size: int = 128,
    has_zeros: bool = True,
    has_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    device: str = "cpu",
) -> tuple[IntWeight, torch.Tensor]:
    """A weight, and the [N, K] float64 matrix it stands for, over the layer's inputs as they come."""
    generator = torch.Generator(device).manual_seed(n * k + bits)
    num_groups = 1 if group_size == -1 else k // group_size
    drawn = {"generator": generator, "device": device}
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, **drawn)
    scales = (torch.rand(num_groups, n, **drawn) + 0.5).mul(0.01).to(scale_dtype)
    zeros = torch.randint(0, 1 << bits, (num_groups, n), dtype=torch.uint8, **drawn) if has_zeros else None
    order = torch.randperm(k, **drawn) if has_order else None
    group_of = torch.arange(k, device=device) // (k // num_groups)
    middle = float(1 << (bits - 1)) if zeros is None else zeros[group_of].T.double()
    dense = (codes.double() - middle) * scales[group_of].T.double()
    if order is not None:
        dense = torch.empty_like(dense).index_copy_(1, order, dense)
    return make_int_weight(codes, scales, zeros, bits=bits, order=order), dense
