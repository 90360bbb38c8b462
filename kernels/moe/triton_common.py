# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Shared parts of the mixture-of-experts Triton kernels, with the roundings of the specification."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_and_mul(gate, up, dtype: tl.constexpr):
    """silu(gate) * up from fp32 sums, rounded to dtype where torch rounds: both inputs, silu, the product."""
    gate = round_to(gate, dtype)
    return (round_to(gate / (1.0 + tl.exp(-gate)), dtype) * round_to(up, dtype)).to(dtype)


@triton.jit
def weigh(value, weight, dtype: tl.constexpr):
    """An expert's output (fp32, not yet rounded to dtype) times its weight, rounded to the weight's dtype; fp32."""
    return round_to(round_to(value, dtype) * weight.to(tl.float32), weight.dtype)


@triton.jit
def add_shared(mixed, shared, gate):
    """The sum over a token's experts plus the shared expert times the sigmoid of its gate, in mixed's dtype."""
    scale = round_to(1.0 / (1.0 + tl.exp(-gate.to(tl.float32))), mixed.dtype)
    return (mixed.to(tl.float32) + round_to(scale * shared.to(tl.float32), mixed.dtype)).to(mixed.dtype)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round to dtype, in fp32: torch rounds after each op."""
    return x.to(dtype).to(tl.float32)
