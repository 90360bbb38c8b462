# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)
"""Routing on the device: each token's experts, and the (token, expert) pairs laid out by expert in tiles of rows.

A counting sort. One launch chooses experts and counts within chunks of tokens; in another each chunk adds the counts of
all chunks, so that none waits for another. Of many chunks a launch between the two sums the counts, since each would
read all of them. The order is fixed: it never depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.moe.configs import MOST_CHUNKS, size_of_chunk
from kernels.moe.reference import Choice

_SUM_COLUMNS, _SUM_ROWS = 8, 128  # experts of a program that sums counts, and the chunks that it reads at once


@dataclass(frozen=True)
class Routing:
    """Each token's experts and weights. Pair index: token * top_k + place."""

    # [T, top_k], descending
    weights: torch.Tensor
    # [T, top_k] int32: of those that are here; -1: not here
    experts: torch.Tensor
    # [T, top_k] int32: how many earlier tokens of its chunk have the same expert; [1, 1] without counts
    ranks: torch.Tensor
    # [num_chunks, E padded to a power of 2] int32: pairs of each chunk, of experts that are here; [1, 1] without counts
    counts: torch.Tensor
    chunk_tokens: int
    has_absent: bool = False  # experts may be -1


@dataclass(frozen=True)
class RowTiles:
    """Pairs in tiles of block_m rows, each tile of one expert; the maximum number of tiles, the last ones empty."""

    # [num_tiles * block_m] int32: pairs; undefined past a tile's rows
    pairs: torch.Tensor
    # [num_tiles] int32
    experts: torch.Tensor
    # [num_tiles] int32: 0 … block_m
    rows: torch.Tensor
    # [num_pairs] int32: each pair's place among `pairs`, -1 for those of experts that are not here; None: not wanted
    positions: torch.Tensor | None = None


def route(
    logits: torch.Tensor,
    *,
    num_experts: int,
    top_k: int,
    renormalize: bool,
    weights_dtype: torch.dtype,
    chunk_tokens: int | None,
    given: torch.Tensor | None = None,
    floor: float = 0.0,
    added: float = 0.0,
    factor: float = 1.0,
    expert_scales: torch.Tensor | None = None,
    choice: Choice | None = None,
    here: range | None = None,
    pdl: bool = False,
) -> Routing:
    """Equal kernels.moe.reference.route on logits[:, :num_experts]. logits: [T, >= num_experts], last dimension dense.

    given: contiguous. chunk_tokens: approximate tokens per chunk; None: one token at a time, without ranks and counts.
    expert_scales: [num_experts] fp32. here: the experts whose products are computed; None: all. choice: computed in the
    same launch; a token with a NaN among its scores has NaN for all its weights.
    """
    chosen_by = choice or Choice("softmax")
    bias, num_groups = chosen_by.bias, chosen_by.num_groups
    has_given = given is not None
    here = here or range(num_experts)
    has_absent = len(here) < num_experts
    num_tokens, device = logits.shape[0], logits.device
    padded = triton.next_power_of_2(num_experts)
    has_counts = chunk_tokens is not None
    tokens = 1 if chunk_tokens is None else size_of_chunk(num_tokens, num_experts, chunk_tokens)
    num_warps = 1 if tokens == 1 else 4 if tokens <= 16 else 8
    num_chunks = triton.cdiv(num_tokens, tokens)
    places = (num_tokens, top_k)
    weights = torch.empty(places, dtype=weights_dtype, device=device)
    experts = torch.empty(places, dtype=torch.int32, device=device)
    ranks = torch.empty(places if has_counts else (1, 1), dtype=torch.int32, device=device)
    counts = torch.empty((num_chunks, padded) if has_counts else (1, 1), dtype=torch.int32, device=device)
    _route_kernel[(num_chunks,)](
        logits, given, bias, expert_scales, weights, experts, ranks, counts, num_tokens, logits.stride(0),
        floor, added, factor, here.start, len(here),
        EXPERTS=num_experts, EXPERTS_PAD=padded, TOP_K=top_k, PLACES_PAD=triton.next_power_of_2(top_k),
        TOKENS=tokens, RENORMALIZE=renormalize, HAS_GIVEN=has_given, HAS_SCALES=expert_scales is not None,
        CHOOSES=choice is not None, IS_SIGMOID=chosen_by.kind == "sigmoid", HAS_BIAS=bias is not None,
        GROUPS=num_groups, GROUPS_PAD=triton.next_power_of_2(num_groups), OPEN_GROUPS=chosen_by.num_groups_per_tok,
        BEST_OF_GROUP=chosen_by.num_best_of_group,
        HAS_COUNTS=has_counts, HAS_ABSENT=has_absent, PDL=pdl,
        num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return Routing(weights, experts, ranks, counts, tokens, has_absent)


def lay_out(
    routing: Routing, *, num_experts: int, block_m: int, has_positions: bool = False, pdl: bool = False
) -> RowTiles:
    """Sort the pairs of a routing with counts by expert, each expert padded to tiles of block_m rows. Never syncs.

    num_experts: those that are here; the pairs of others have no rows. has_positions: of RowTiles.
    """
    num_tokens, top_k = routing.experts.shape
    num_chunks, padded = routing.counts.shape
    num_tiles = max_tiles(num_pairs=num_tokens * top_k, num_experts=num_experts, block_m=block_m)
    pairs, experts, rows = (
        torch.empty(n, dtype=torch.int32, device=routing.experts.device)
        for n in (num_tiles * block_m, num_tiles, num_tiles)
    )
    tiles = RowTiles(pairs, experts, rows, torch.empty_like(routing.experts).flatten() if has_positions else None)
    counts, totals = routing.counts, None
    if num_chunks > MOST_CHUNKS:
        counts, totals = torch.empty_like(counts), counts.new_empty(padded)
        columns = min(_SUM_COLUMNS, padded)
        _sum_counts_kernel[(padded // columns,)](
            routing.counts, counts, totals, num_chunks,
            EXPERTS_PAD=padded, COLUMNS=columns, CHUNKS=_SUM_ROWS, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    _lay_out_kernel[(num_chunks,)](
        routing.experts, routing.ranks, counts, totals, tiles.pairs, tiles.experts, tiles.rows, tiles.positions,
        num_tokens, num_chunks, num_tiles,
        EXPERTS_PAD=padded, TOP_K=top_k, TOKENS=routing.chunk_tokens, CHUNKS=max(1, 4096 // padded), TILES=16,
        BLOCK_M=block_m, PDL=pdl, num_warps=4 if routing.chunk_tokens <= 16 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return tiles


def max_tiles(*, num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the largest number of tiles of block_m rows that num_pairs pairs take, for any routing."""
    num_hit = min(num_experts, num_pairs)
    return (num_pairs + num_hit * (block_m - 1)) // block_m


@triton.jit(do_not_specialize=["num_tokens", "floor", "added", "factor", "first_here", "num_here"])
def _route_kernel(
    logits_ptr, given_ptr, bias_ptr, scales_ptr, weights_ptr, experts_ptr, ranks_ptr, counts_ptr, num_tokens,
    stride_logits, floor, added, factor, first_here, num_here,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, PLACES_PAD: tl.constexpr,
    TOKENS: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_GIVEN: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_COUNTS: tl.constexpr, HAS_ABSENT: tl.constexpr, PDL: tl.constexpr,
    CHOOSES: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, OPEN_GROUPS: tl.constexpr, BEST_OF_GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk of tokens: the softmax if no weights are given, then top_k rounds, each taking the largest one left.

    CHOOSES: weights and scores are those of kernels.moe.reference.choose.
    """
    chunk = tl.program_id(0)
    tokens = chunk * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, EXPERTS_PAD)[None, :]
    places = tl.arange(0, PLACES_PAD)[None, :]
    is_live = tokens < num_tokens
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    weights, experts, chosen = choose_experts(
        logits_ptr, given_ptr, bias_ptr, scales_ptr, tokens, is_live, columns, places, stride_logits, floor, added,
        factor, EXPERTS, EXPERTS_PAD, TOP_K, PLACES_PAD, TOKENS, RENORMALIZE, HAS_GIVEN, HAS_SCALES, CHOOSES,
        IS_SIGMOID, HAS_BIAS, GROUPS, GROUPS_PAD, OPEN_GROUPS, BEST_OF_GROUP, not HAS_COUNTS,
    )  # fmt: skip
    pairs = tokens[:, None] * TOP_K + places
    is_pair = is_live[:, None] & (places < TOP_K)
    tl.store(weights_ptr + pairs, weights.to(weights_ptr.dtype.element_ty), mask=is_pair)
    indices = experts
    if HAS_ABSENT:
        indices -= first_here
        indices = tl.where((indices >= 0) & (indices < num_here), indices, -1)
    tl.store(experts_ptr + pairs, indices, mask=is_pair)
    if HAS_COUNTS:
        chosen = tl.where(is_live[:, None], chosen, 0)
        targets = tl.arange(0, EXPERTS_PAD)
        if HAS_ABSENT:  # the columns of experts that are here come first, those of others are 0
            chosen = tl.where((columns >= first_here) & (columns < first_here + num_here), chosen, 0)
            targets = (targets - first_here) & (EXPERTS_PAD - 1)
        earlier = tl.cumsum(chosen, 0) - chosen
        tl.store(counts_ptr + chunk * EXPERTS_PAD + targets, tl.sum(chosen, 0))
        for place in tl.static_range(TOP_K):
            expert = tl.sum(tl.where(places == place, experts, 0), 1)
            rank = tl.sum(tl.where(columns == expert[:, None], earlier, 0), 1)
            tl.store(ranks_ptr + tokens * TOP_K + place, rank, mask=is_live)


@triton.jit
def choose_experts(
    logits_ptr, given_ptr, bias_ptr, scales_ptr, tokens, is_live, columns, places, stride_logits, floor, added, factor,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, PLACES_PAD: tl.constexpr,
    TOKENS: tl.constexpr, RENORMALIZE: tl.constexpr, HAS_GIVEN: tl.constexpr, HAS_SCALES: tl.constexpr,
    CHOOSES: tl.constexpr, IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, OPEN_GROUPS: tl.constexpr, BEST_OF_GROUP: tl.constexpr, BY_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the weights and experts of some tokens, [TOKENS, PLACES_PAD], and 1 for each that is chosen, 0 for others.

    is_live: [TOKENS]; columns: [1, EXPERTS_PAD]; places: [1, PLACES_PAD]. BY_BITS: the largest is found by integers,
    for which a warp has an instruction.
    """
    sources = logits_ptr + tokens.to(tl.int64)[:, None] * stride_logits + columns
    logits = tl.load(sources, mask=is_live[:, None] & (columns < EXPERTS), other=0.0).to(tl.float32)
    logits = tl.where(columns < EXPERTS, logits, -float("inf"))
    if HAS_GIVEN:
        given_places = tokens.to(tl.int64)[:, None] * EXPERTS + columns
        given = tl.load(given_ptr + given_places, mask=is_live[:, None] & (columns < EXPERTS), other=0.0)
        left = logits
    elif CHOOSES:
        given, left = _score(logits, bias_ptr, columns, logits_ptr.dtype.element_ty, EXPERTS, IS_SIGMOID, HAS_BIAS)
    else:
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        left = powers / tl.sum(powers, 1)[:, None]
        given = left
    # A token of NaN has experts too, whose weights are NaN
    no_numbers = tl.max((left != left).to(tl.int32), 1) > 0
    left = tl.where(columns < EXPERTS, tl.where(left == left, left, 0.0), -float("inf"))
    if GROUPS > 1:
        left = _open_groups(left, columns, EXPERTS // GROUPS, GROUPS, GROUPS_PAD, OPEN_GROUPS, BEST_OF_GROUP)
    ranks = left
    if BY_BITS:  # integers in the order of the scores, of which none is NaN; -0 becomes 0
        bits = (left + 0.0).to(tl.int32, bitcast=True)
        ranks = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    weights = tl.zeros([TOKENS, PLACES_PAD], tl.float32)
    experts = tl.zeros([TOKENS, PLACES_PAD], tl.int32)
    chosen = tl.zeros([TOKENS, EXPERTS_PAD], tl.int32)
    total = tl.zeros([TOKENS], tl.float32)
    for place in tl.static_range(TOP_K):
        if BY_BITS:
            most = tl.max(ranks, 1)
            expert = tl.min(tl.where(ranks == most[:, None], columns, EXPERTS_PAD), 1)
            value = (most ^ ((most >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            is_expert = columns == expert[:, None]
            ranks = tl.where(is_expert, -0x80000000, ranks)
        else:
            value, expert = tl.max(ranks, 1, return_indices=True, return_indices_tie_break_left=True)
            is_expert = columns == expert[:, None]
            ranks = tl.where(is_expert, -float("inf"), ranks)
        if HAS_GIVEN or CHOOSES:
            value = tl.sum(tl.where(is_expert, given, 0.0), 1)
        chosen = tl.where(is_expert, 1, chosen)
        weights = tl.where(places == place, value[:, None], weights)
        experts = tl.where(places == place, expert[:, None], experts)
        total += value
    if RENORMALIZE:
        weights = weights / (tl.maximum(total, floor) + added)[:, None]
    weights = weights * factor
    if HAS_SCALES:
        weights = weights * tl.load(scales_ptr + experts)  # places that are none have expert 0
    weights = tl.where(no_numbers[:, None], float("nan"), weights)
    return weights, experts, chosen


@triton.jit
def _score(
    logits, bias_ptr, columns, dtype: tl.constexpr, EXPERTS: tl.constexpr, IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return weights, rounded to the dtype of logits, and scores: [TOKENS, EXPERTS_PAD] fp32."""
    if IS_SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        weights = powers / tl.sum(powers, 1)[:, None]
    weights = weights.to(dtype).to(tl.float32)
    scores = weights
    if HAS_BIAS:
        scores += tl.load(bias_ptr + columns, mask=columns < EXPERTS, other=0.0)
    return weights, scores


@triton.jit
def _open_groups(
    scores, columns, SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, OPEN: tl.constexpr,
    BEST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return scores, -inf outside each token's OPEN best groups of SIZE neighbouring experts."""
    group_of = columns // SIZE
    groups = tl.arange(0, GROUPS_PAD)[None, :]
    totals = tl.full([scores.shape[0], GROUPS_PAD], -float("inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(group_of == group, scores, -float("inf"))
        total = tl.zeros([scores.shape[0]], tl.float32)
        for _ in tl.static_range(BEST):
            value = tl.max(own, 1)
            total += value
            first = tl.min(tl.where(own == value[:, None], columns, scores.shape[1]), 1)
            own = tl.where(columns == first[:, None], -float("inf"), own)
        totals = tl.where(groups == group, total[:, None], totals)
    is_open = tl.zeros([scores.shape[0], scores.shape[1]], tl.int32)
    for _ in tl.static_range(OPEN):
        best = tl.min(tl.where(totals == tl.max(totals, 1)[:, None], groups, GROUPS_PAD), 1)
        totals = tl.where(groups == best[:, None], -float("inf"), totals)
        is_open = tl.where(group_of == best[:, None], 1, is_open)
    return tl.where(is_open > 0, scores, -float("inf"))


@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "num_tiles"])
def _lay_out_kernel(
    experts_ptr, ranks_ptr, counts_ptr, totals_ptr, pairs_ptr, tile_experts_ptr, tile_rows_ptr, positions_ptr,
    num_tokens, num_chunks, num_tiles,
    EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk: the positions of its pairs, and its share of the tiles' experts and row counts.

    With totals_ptr, the sums of all chunks, counts are those of the chunks before each.
    """
    chunk = tl.program_id(0)
    columns = tl.arange(0, EXPERTS_PAD)
    totals = tl.zeros([EXPERTS_PAD], tl.int32)
    earlier = tl.zeros([EXPERTS_PAD], tl.int32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if totals_ptr is not None:
        totals = tl.load(totals_ptr + columns)
        earlier = tl.load(counts_ptr + chunk * EXPERTS_PAD + columns)
    else:
        for first in range(0, num_chunks, CHUNKS):
            chunks = first + tl.arange(0, CHUNKS)
            sources = counts_ptr + chunks[:, None] * EXPERTS_PAD + columns[None, :]
            counts = tl.load(sources, mask=(chunks < num_chunks)[:, None], other=0)
            totals += tl.sum(counts, 0)
            earlier += tl.sum(tl.where((chunks < chunk)[:, None], counts, 0), 0)
    room = (totals + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    ends = tl.cumsum(room, 0)
    starts = ends - room

    tokens = chunk * TOKENS + tl.arange(0, TOKENS)
    is_live = tokens < num_tokens
    for place in tl.static_range(TOP_K):
        pairs = tokens * TOP_K + place
        expert = tl.load(experts_ptr + pairs, mask=is_live, other=0)
        rank = tl.load(ranks_ptr + pairs, mask=is_live, other=0)
        is_expert = columns[None, :] == expert[:, None]
        base = tl.sum(tl.where(is_expert, (starts + earlier)[None, :], 0), 1)
        tl.store(pairs_ptr + base + rank, pairs, mask=is_live & (expert >= 0))
        if positions_ptr is not None:
            tl.store(positions_ptr + pairs, tl.where(expert >= 0, base + rank, -1), mask=is_live)

    for first in range(chunk * TILES, num_tiles, num_chunks * TILES):
        tiles = first + tl.arange(0, TILES)
        begins = tiles * BLOCK_M
        tile_expert = tl.sum((ends[None, :] <= begins[:, None]).to(tl.int32), 1)
        is_tile_expert = columns[None, :] == tile_expert[:, None]
        # Past the last expert no column matches: no rows
        rows = tl.sum(tl.where(is_tile_expert, (starts + totals)[None, :], 0), 1) - begins
        tl.store(tile_experts_ptr + tiles, tile_expert, mask=tiles < num_tiles)
        tl.store(tile_rows_ptr + tiles, tl.minimum(tl.maximum(rows, 0), BLOCK_M), mask=tiles < num_tiles)


@triton.jit(do_not_specialize=["num_chunks"])
def _sum_counts_kernel(
    counts_ptr, earlier_ptr, totals_ptr, num_chunks,
    EXPERTS_PAD: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """COLUMNS experts: the sum of the counts of the chunks before each, and of all."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    totals = tl.zeros([COLUMNS], tl.int32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        places = chunks[:, None] * EXPERTS_PAD + columns[None, :]
        is_chunk = (chunks < num_chunks)[:, None]
        counts = tl.load(counts_ptr + places, mask=is_chunk, other=0)
        tl.store(earlier_ptr + places, totals[None, :] + tl.cumsum(counts, 0) - counts, mask=is_chunk)
        totals += tl.sum(counts, 0)
    tl.store(totals_ptr + columns, totals)
