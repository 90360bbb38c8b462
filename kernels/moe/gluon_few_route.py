"""The choice of a token's experts inside the products of kernels/moe/gluon_few.py: softmax, then the largest in turn.

Every program chooses anew, from logits that L2 has: a launch less, and nothing passes from one kernel to the next. All
programs choose alike, as a warp does it by itself, whatever their number of warps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)


@dataclass(frozen=True)
class LateRouting:
    """What few tokens' experts are chosen by: arguments of kernels.moe.triton_route.route."""

    logits: torch.Tensor  # [T, >= num_experts], last dimension dense
    num_experts: int
    top_k: int
    renormalize: bool
    weights_dtype: torch.dtype
    floor: float = 0.0
    added: float = 0.0
    factor: float = 1.0

    @property
    def padded(self) -> int:
        """The power of two that the kernels take for num_experts."""
        return max(32, triton.next_power_of_2(self.num_experts))


@triton.constexpr_function
def _layout(num_experts, num_warps):
    """Return a layout of [num_experts] in which each warp has all."""
    per_lane = num_experts // 32
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << i] for i in range(per_lane.bit_length() - 1)],
        lane_bases=[[per_lane << i] for i in range(5)],
        warp_bases=[[0] for _ in range(num_warps.bit_length() - 1)],
        block_bases=[],
        shape=[num_experts],
    )


@jit
def rank_experts(logits_ptr, EXPERTS: gl.constexpr, PADDED: gl.constexpr):
    """Return the bits of each expert's probability, [PADDED] int32, in its order; 1 if one was no number, which is 0.

    -1: no expert, or chosen already.
    """
    experts = gl.arange(0, PADDED, _layout(PADDED, gl.num_warps()))
    logits = gl.load(logits_ptr + experts, mask=experts < EXPERTS, other=-float("inf")).to(gl.float32)
    powers = gl.exp(logits - gl.max(logits, 0))
    shares = powers / gl.sum(powers, 0)
    no_numbers = gl.max((shares != shares).to(gl.int32), 0)
    shares = gl.where(shares == shares, shares, 0.0)
    return gl.where(experts < EXPERTS, shares.to(gl.int32, bitcast=True), -1), no_numbers


@jit
def take_expert(ranks, PADDED: gl.constexpr):
    """Return the best expert left, the first of equals, the bits of its probability, and what is left."""
    experts = gl.arange(0, PADDED, _layout(PADDED, gl.num_warps()))
    most = gl.max(ranks, 0)
    expert = gl.min(gl.where(ranks == most, experts, PADDED), 0)
    return expert, most, gl.where(experts == expert, -1, ranks)


@jit
def take_all(ranks, rows, places, TOP_K: gl.constexpr, PADDED: gl.constexpr):
    """Return the experts of rows and of places, and the bits of the latter's probabilities; past TOP_K the last's.

    rows: [M] int32, the place of each; places: [N] int32.
    """
    of_rows, of_places, bits = gl.zeros_like(rows), gl.zeros_like(places), gl.zeros_like(places)
    for place in gl.static_range(TOP_K):
        expert, most, ranks = take_expert(ranks, PADDED)
        of_rows = gl.where(rows >= place, expert, of_rows)
        of_places = gl.where(places >= place, expert, of_places)
        bits = gl.where(places >= place, most, bits)
    return of_rows, of_places, bits
