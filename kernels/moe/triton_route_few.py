# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Routing of few tokens in one launch: a program chooses all experts and lays out their pairs in tiles of rows.

Pairs are compared with one another instead of counted by expert, since they are fewer than experts. The order is that
of kernels/moe/triton_route.py: by expert, then by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.moe.reference import Choice
from kernels.moe.triton_route import Routing, RowTiles, choose_experts, max_tiles

# Each pair is compared with each, and one program chooses for all tokens. Pairs, of a power of two of tokens and of
# experts of each: 8 tokens of 128 experts take 4.2 us instead of 6.9 in two launches, 16 tokens 8.8.
# Scores: 8 tokens of 256 experts take 4.9 us instead of 8.5
_MOST_PAIRS = 64
_MOST_SCORES = 2048
_MOST_TOKENS = 16


def routes_once(*, num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Return True if one launch that routes and lays out is faster than two."""
    tokens, places, experts = (triton.next_power_of_2(size) for size in (num_tokens, top_k, num_experts))
    return tokens <= _MOST_TOKENS and tokens * places <= _MOST_PAIRS and tokens * experts <= _MOST_SCORES


def route_few(
    logits: torch.Tensor,
    *,
    num_experts: int,
    top_k: int,
    renormalize: bool,
    weights_dtype: torch.dtype,
    block_m: int,
    given: torch.Tensor | None = None,
    floor: float = 0.0,
    added: float = 0.0,
    factor: float = 1.0,
    expert_scales: torch.Tensor | None = None,
    choice: Choice | None = None,
    here: range | None = None,
    pdl: bool = False,
) -> tuple[Routing, RowTiles]:
    """Equal kernels.moe.triton_route.route and lay_out, in one launch."""
    chosen_by = choice or Choice("softmax")
    here = here or range(num_experts)
    num_tokens, device = logits.shape[0], logits.device
    tokens, places = triton.next_power_of_2(num_tokens), triton.next_power_of_2(top_k)
    weights = torch.empty(num_tokens, top_k, dtype=weights_dtype, device=device)
    experts, unused = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in ((num_tokens, top_k), (1, 1))
    )  # fmt: skip
    num_tiles = max_tiles(num_pairs=num_tokens * top_k, num_experts=len(here), block_m=block_m)
    pairs, tile_experts, rows = (
        torch.empty(n, dtype=torch.int32, device=device) for n in (num_tiles * block_m, num_tiles, num_tiles)
    )  # fmt: skip
    _route_few_kernel[(1,)](
        logits, given, chosen_by.bias, expert_scales, weights, experts, pairs, tile_experts, rows, num_tokens,
        logits.stride(0), floor, added, factor, here.start, len(here), num_tiles,
        EXPERTS=num_experts, EXPERTS_PAD=triton.next_power_of_2(num_experts), TOP_K=top_k, PLACES_PAD=places,
        TOKENS=tokens, RENORMALIZE=renormalize, HAS_GIVEN=given is not None, HAS_SCALES=expert_scales is not None,
        CHOOSES=choice is not None, IS_SIGMOID=chosen_by.kind == "sigmoid", HAS_BIAS=chosen_by.bias is not None,
        GROUPS=chosen_by.num_groups, GROUPS_PAD=triton.next_power_of_2(chosen_by.num_groups),
        OPEN_GROUPS=chosen_by.num_groups_per_tok, BEST_OF_GROUP=chosen_by.num_best_of_group, BLOCK_M=block_m,
        PDL=pdl, num_warps=min(16, tokens), launch_pdl=pdl,
    )  # fmt: skip
    return (
        Routing(weights, experts, unused, unused, num_tokens, len(here) < num_experts),
        RowTiles(pairs, tile_experts, rows),
    )


@triton.jit(do_not_specialize=["num_tokens", "floor", "added", "factor", "first_here", "num_here", "num_tiles"])
def _route_few_kernel(
    logits_ptr, given_ptr, bias_ptr, scales_ptr, weights_ptr, experts_ptr, pairs_ptr, tile_experts_ptr, tile_rows_ptr,
    num_tokens, stride_logits, floor, added, factor, first_here, num_here, num_tiles,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, PLACES_PAD: tl.constexpr,
    TOKENS: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_GIVEN: tl.constexpr, HAS_SCALES: tl.constexpr,
    CHOOSES: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, OPEN_GROUPS: tl.constexpr, BEST_OF_GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All tokens. A pair's rank is the number of earlier pairs of its expert; one in BLOCK_M opens a tile."""
    tokens = tl.arange(0, TOKENS)
    columns = tl.arange(0, EXPERTS_PAD)[None, :]
    places = tl.arange(0, PLACES_PAD)[None, :]
    is_live = tokens < num_tokens
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    weights, experts, _ = choose_experts(
        logits_ptr, given_ptr, bias_ptr, scales_ptr, tokens, is_live, columns, places, stride_logits, floor, added,
        factor, EXPERTS, EXPERTS_PAD, TOP_K, PLACES_PAD, TOKENS, RENORMALIZE, HAS_GIVEN, HAS_SCALES, CHOOSES,
        IS_SIGMOID, HAS_BIAS, GROUPS, GROUPS_PAD, OPEN_GROUPS, BEST_OF_GROUP, True,
    )  # fmt: skip
    experts -= first_here
    experts = tl.where((experts >= 0) & (experts < num_here), experts, -1)
    pairs = tokens[:, None] * TOP_K + places
    is_pair = is_live[:, None] & (places < TOP_K)
    tl.store(weights_ptr + pairs, weights.to(weights_ptr.dtype.element_ty), mask=is_pair)
    tl.store(experts_ptr + pairs, experts, mask=is_pair)
    # From here on a pair is one of PAIRS places, in the order of tokens
    PAIRS: tl.constexpr = TOKENS * PLACES_PAD
    own = tl.reshape(tl.where(is_pair, experts, -1), [PAIRS])
    pairs = tl.reshape(pairs, [PAIRS])
    order = tl.arange(0, PAIRS)
    is_here = own >= 0
    is_same = (own[:, None] == own[None, :]) & is_here[:, None]
    ranks = tl.sum((is_same & (order[None, :] < order[:, None])).to(tl.int32), 1)
    totals = tl.sum(is_same.to(tl.int32), 1)
    opens = is_here & (ranks % BLOCK_M == 0)
    tiles = tl.sum((opens[None, :] & (own[None, :] < own[:, None])).to(tl.int32), 1) + ranks // BLOCK_M
    tl.store(pairs_ptr + tiles * BLOCK_M + ranks % BLOCK_M, pairs, mask=is_here)
    tl.store(tile_experts_ptr + tiles, own, mask=opens)
    tl.store(tile_rows_ptr + tiles, tl.minimum(totals - ranks, BLOCK_M), mask=opens)
    empty = tl.sum(opens.to(tl.int32), 0) + order
    tl.store(tile_experts_ptr + empty, 0, mask=empty < num_tiles)
    tl.store(tile_rows_ptr + empty, 0, mask=empty < num_tiles)
