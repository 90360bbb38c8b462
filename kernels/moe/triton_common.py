# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""Shared parts of the mixture-of-experts Triton kernels: places of tiles, and the roundings of the specification."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_tile(num_tiles, n, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return this program's tile of rows, of num_tiles, and its output features, [BLOCK_N], of n.

    GROUP_M tiles of rows run side by side over the same tile of weights.
    """
    tile, place = place_of(num_tiles, tl.cdiv(n, BLOCK_N), GROUP_M)
    return tile, place * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def place_of(num_tiles, num_places, GROUP_M: tl.constexpr):
    """Return this program's tile of rows, of num_tiles, and its place among the tiles of output features."""
    program = tl.program_id(0)
    in_group = GROUP_M * num_places
    first_tile = program // in_group * GROUP_M
    height = tl.minimum(num_tiles - first_tile, GROUP_M)
    return first_tile + program % in_group % height, program % in_group // height


@triton.jit
def gate_and_mul(gate, up, dtype: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Join gate and up (fp32 sums) as kernels.moe.reference.Gate says, rounded to dtype where torch rounds."""
    gate, up = round_to(gate, dtype), round_to(up, dtype)
    if KIND == "relu2":  # `gate` is the only product
        gate = tl.maximum(gate, 0.0)
        product = gate * gate
    elif KIND == "clamped":
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        sigmoid = round_to(1.0 / (1.0 + tl.exp(-round_to(gate * ALPHA, dtype))), dtype)
        product = round_to(up + 1.0, dtype) * round_to(gate * sigmoid, dtype)
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 * u; the factor is 2 * sqrt(2 / pi)
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        product = round_to(gate / (1.0 + tl.exp(-logit)), dtype) * up
    else:
        product = round_to(gate / (1.0 + tl.exp(-gate)), dtype) * up
    return product.to(dtype)


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
