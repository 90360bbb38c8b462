"""Triton twin of kernels.sampling.reference.sample: one pass over the logits, with per-request state by req_index.

Each row is cut into splits; the split that arrives last at a row's counter selects the best of all and writes the
token, so a batch without truncation is one launch. Rows with top-k, top-p or min-p are searched first
(triton_truncation). The result depends neither on the number of splits nor on the batch.

Deviations from the specification: the Gumbel noise computes its outer logarithm, and the inner one far from 1, with
the hardware's approximation, so it differs by some 1e-6 and a token by about one draw in 100,000; a uniform number that
rounds to 1 counts as the largest below it, since its noise would be infinite; equal logits at a cut are kept in order
of token id, which torch.topk leaves undefined.

Triton twins of kernels/sampling/reference.py's penalize and allow_only: a row's logits in one pass, in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.sampling.reference import NO_TOKEN, SamplingState
from kernels.sampling.triton_truncation import MINUS_INF, TruncationScratch, divide, find_cuts

# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)


_MAX_SPLITS = 256
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class SamplingConfig:
    """Tile size and number of splits of a batch: every split takes whole tiles."""

    tile: int  # tokens
    num_splits: int
    num_warps: int


@dataclass(frozen=True)
class SamplingScratch:
    """Buffers in which the splits of a row are merged. One per stream: two calls in flight must not share it."""

    # [capacity] float32 and int32: each split's best score, and its token
    partial_score: torch.Tensor
    partial_id: torch.Tensor
    # [max_rows] int32: splits arrived per row; zero between calls
    arrivals: torch.Tensor
    truncation: TruncationScratch
    target_programs: int

    @classmethod
    def allocate(cls, *, max_rows: int, vocab_size: int, device: torch.device) -> SamplingScratch:
        """Allocate for any batch of up to max_rows rows."""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        target_programs = 8 * num_sms
        # num_splits rounds up, so rows * splits stays under target + rows
        capacity = target_programs + max_rows
        return cls(
            partial_score=torch.empty(capacity, dtype=torch.float32, device=device),
            partial_id=torch.empty(capacity, dtype=torch.int32, device=device),
            arrivals=torch.zeros(max_rows, dtype=torch.int32, device=device),
            truncation=TruncationScratch.allocate(max_rows=max_rows, vocab_size=vocab_size, device=device),
            target_programs=target_programs,
        )

    def config(self, *, num_rows: int, vocab_size: int) -> SamplingConfig:
        """Return the config that was best at 1, 8, 64 and 256 rows on an H100, greedy and drawn: no split is empty."""
        tile = 2048
        num_tiles = triton.cdiv(vocab_size, tile)
        wanted = max(1, min(_MAX_SPLITS, num_tiles, triton.cdiv(self.target_programs, num_rows)))
        num_splits = triton.cdiv(num_tiles, triton.cdiv(num_tiles, wanted))
        return SamplingConfig(tile, num_splits, num_warps=8)


def sample(
    logits: torch.Tensor,
    *,
    req_index: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingState,
    scratch: SamplingScratch,
    has_truncation: bool,
    out: torch.Tensor,
    config: SamplingConfig | None = None,
    pdl: bool = False,
) -> None:
    """Write each row's token to out and to state.last_token[req_index]. Graph-safe; never syncs.

    out: NO_TOKEN for a row with a logit that is NaN or +inf; last_token is then 0, since the next step may embed it.

    logits: [S, V] bf16, fp16 or fp32, last dimension dense, penalties and bias applied; req_index, positions (the place
    of the token to be chosen), out: [S] int64. Rows may share a req_index only if its token is not read (padding).
    has_truncation: False promises that no row with a temperature has top_k, top_p or min_p; True costs two launches.
    config: overrides the choice (benchmarks); pdl: launch early, under the kernel before (programmatic dependent
    launch).
    """
    num_rows, size = logits.shape
    config = config or scratch.config(num_rows=num_rows, vocab_size=size)
    assert logits.stride(1) == 1
    assert num_rows <= scratch.arrivals.shape[0]
    assert config.num_splits == 1 or num_rows * config.num_splits <= scratch.partial_id.shape[0]
    cuts = scratch.truncation
    if has_truncation:
        find_cuts(logits, req_index=req_index, state=state, scratch=cuts, pdl=pdl)
    tokens_per_split = triton.cdiv(triton.cdiv(size, config.tile), config.num_splits) * config.tile
    _sample_kernel[(config.num_splits, num_rows)](
        logits, req_index, positions, state.temperature, state.seeds, cuts.cut, cuts.cut_id, cuts.floor,
        scratch.partial_score, scratch.partial_id, scratch.arrivals, state.last_token, out,
        logits.stride(0), size, tokens_per_split,
        TILE=config.tile, SPLITS_PAD=triton.next_power_of_2(config.num_splits),
        HAS_TRUNCATION=has_truncation, ON_GPU=logits.is_cuda, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _sample_kernel(
    logits_ptr, req_index_ptr, positions_ptr, temperature_ptr, seeds_ptr, cut_ptr, cut_id_ptr, floor_ptr,
    partial_score_ptr, partial_id_ptr, arrivals_ptr, last_token_ptr, out_ptr, stride_row, size, tokens_per_split,
    TILE: tl.constexpr, SPLITS_PAD: tl.constexpr,
    HAS_TRUNCATION: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One (split, row). Splits vary fastest: neighbours in memory run together."""
    split, row = tl.program_id(0), tl.program_id(1)
    num_splits = tl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    req_index = tl.load(req_index_ptr + row)
    temperature = tl.load(temperature_ptr + req_index)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    start = split * tokens_per_split
    end = tl.minimum(start + tokens_per_split, size)
    if temperature > 0.0:
        key_0, key_1 = _noise_keys(tl.load(seeds_ptr + req_index), tl.load(positions_ptr + row))
        cut, floor = tl.full([], MINUS_INF, tl.float32), tl.full([], MINUS_INF, tl.float32)
        cut_id = tl.full([], 0, tl.int32)
        if HAS_TRUNCATION:
            cut, cut_id, floor = tl.load(cut_ptr + row), tl.load(cut_id_ptr + row), tl.load(floor_ptr + row)
        score, token, is_finite = _draw(
            row_ptr, start, end, temperature, key_0, key_1, cut, cut_id, floor, TILE, HAS_TRUNCATION, ON_GPU
        )  # fmt: skip
    else:
        score, token, is_finite = _take_largest(row_ptr, start, end, TILE)
    token = tl.where(is_finite, token, _NO_TOKEN)
    if SPLITS_PAD == 1:
        tl.store(out_ptr + row, token.to(tl.int64))
        tl.store(last_token_ptr + req_index, tl.maximum(token, 0).to(tl.int64))
    else:
        entries = row * num_splits
        tl.store(partial_score_ptr + entries + split, score)
        tl.store(partial_id_ptr + entries + split, token)
        # Every thread's stores before the one thread's release; its acquire before every thread's loads
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
        tl.device_assert(arrived < num_splits, "arrivals were not zero before the launch")  # with TRITON_DEBUG=1
        if arrived == num_splits - 1:
            tl.store(arrivals_ptr + row, 0)
            splits = tl.arange(0, SPLITS_PAD)
            is_there = splits < num_splits
            # Loads skip L1: other SMs wrote these
            scores = tl.load(partial_score_ptr + entries + splits, mask=is_there, other=MINUS_INF, cache_modifier=".cg")
            tokens = tl.load(partial_id_ptr + entries + splits, mask=is_there, other=size, cache_modifier=".cg")
            _, token = _best(scores, tokens, size)
            token = tl.where(tl.min(tokens, 0) == _NO_TOKEN, _NO_TOKEN, token)
            tl.store(out_ptr + row, token.to(tl.int64))
            tl.store(last_token_ptr + req_index, tl.maximum(token, 0).to(tl.int64))


@triton.jit
def _take_largest(row_ptr, start, end, TILE: tl.constexpr):
    """Return (largest logit, its token id, no logit is NaN or +inf) of a range."""
    lanes = tl.arange(0, TILE)
    scores = tl.full([TILE], MINUS_INF, tl.float32)
    tokens = start + lanes
    finite = tl.full([TILE], 1, tl.int32)
    for first in range(start, end, TILE):
        ids = first + lanes
        x = tl.load(row_ptr + ids, mask=ids < end, other=MINUS_INF).to(tl.float32)
        finite &= (x < float("inf")).to(tl.int32)
        is_better = x > scores
        scores = tl.where(is_better, x, scores)
        tokens = tl.where(is_better, ids, tokens)
    score, token = _best(scores, tokens, end)
    return score, token, tl.min(finite, 0) > 0


@triton.jit
def _draw(
    row_ptr, start, end, temperature, key_0, key_1, cut, cut_id, floor,
    TILE: tl.constexpr, HAS_TRUNCATION: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """As _take_largest, of score = logit / temperature + noise. Masked logits never win."""
    lanes = tl.arange(0, TILE)
    scores = tl.full([TILE], MINUS_INF, tl.float32)
    tokens = start + lanes
    finite = tl.full([TILE], 1, tl.int32)
    for first in range(start, end, TILE):
        ids = first + lanes
        x = tl.load(row_ptr + ids, mask=ids < end, other=MINUS_INF).to(tl.float32)
        finite &= (x < float("inf")).to(tl.int32)
        if HAS_TRUNCATION:
            if tl.max(x, 0) >= cut:
                scaled = divide(x, temperature)
                is_kept = ((x > cut) | ((x == cut) & (ids <= cut_id))) & (scaled >= floor)
                score = scaled + _noise(ids, key_0, key_1, ON_GPU)
                is_better = is_kept & (score > scores)
                scores = tl.where(is_better, score, scores)
                tokens = tl.where(is_better, ids, tokens)
        else:
            score = divide(x, temperature) + _noise(ids, key_0, key_1, ON_GPU)
            is_better = score > scores  # false for the NaN that divide makes of -inf
            scores = tl.where(is_better, score, scores)
            tokens = tl.where(is_better, ids, tokens)
    score, token = _best(scores, tokens, end)
    return score, token, tl.min(finite, 0) > 0


@triton.jit
def _best(scores, tokens, size):
    """Return (largest score, the lowest token id that has it)."""
    score = tl.max(scores, 0)
    return score, tl.min(tl.where(scores == score, tokens, size), 0)


@triton.jit
def _noise_keys(seed, position):
    """Return the uint32 scalars of gumbel_noise that all tokens of a row share."""
    key_0 = _mix(seed.to(tl.uint32) ^ _mix(position.to(tl.uint32) * 0x9E3779B9))
    return key_0, _mix((seed >> 32).to(tl.uint32) + key_0)


@triton.jit
def _noise(ids, key_0, key_1, ON_GPU: tl.constexpr):
    """gumbel_noise of token ids: -log(-log(uniform)), the uniform number from a hash."""
    bits = _mix(_mix(ids.to(tl.uint32) ^ key_0) + key_1)
    uniform = ((bits >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    uniform = tl.minimum(uniform, 0.9999999403953552)
    # Near 1, where the large noise comes from, log2 is inexact: the series of log(1 - rest); 1 - uniform is exact
    rest = 1.0 - uniform
    series = 1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * (0.25 + rest * (0.2 + rest * (1.0 / 6.0)))))
    exponential = tl.where(rest < 0.0625, rest * series, _log2(uniform, ON_GPU) * -_LN_2)
    return _log2(exponential, ON_GPU) * -_LN_2


@triton.jit
def _log2(x, ON_GPU: tl.constexpr):
    """log2 of a normal number by one hardware instruction; Triton's tl.log2 uses more."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    return tl.log2(x)


@triton.jit
def _mix(x):
    """reference._mix on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


# ruff: noqa: ANN001  (Triton reads annotations as types: kernel arguments carry none)


_BLOCK = 4096  # tokens of one program


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    req_index: torch.Tensor,
    *,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Equal kernels.sampling.reference.penalize, bit for bit."""
    vocab_size = logits.shape[1]
    _penalize_kernel[(rows.shape[0], triton.cdiv(vocab_size, _BLOCK))](
        logits, rows, req_index, output_counts, in_prompt.view(torch.int8), presence, frequency, repetition,
        vocab_size, logits.stride(0), BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def allow_only(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Equal kernels.sampling.reference.allow_only."""
    vocab_size = logits.shape[1]
    _allow_kernel[(rows.shape[0], triton.cdiv(vocab_size, _BLOCK))](
        logits, rows, bitmask, vocab_size, logits.stride(0), bitmask.stride(0), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _penalize_kernel(
    logits_ptr, rows_ptr, req_index_ptr, counts_ptr, in_prompt_ptr, presence_ptr, frequency_ptr, repetition_ptr,
    vocab_size, stride_logits, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One part of one row."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    req_index = tl.load(req_index_ptr + tl.program_id(0)).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits + tokens, mask=mask, other=0.0)
    counts = tl.load(counts_ptr + req_index * vocab_size + tokens, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + req_index * vocab_size + tokens, mask=mask, other=0)
    has_output = counts > 0
    scale = tl.where(has_output | (in_prompt != 0), tl.load(repetition_ptr + req_index), 1.0)
    logits = tl.where(logits > 0, tl.math.div_rn(logits, scale), logits * scale)
    logits -= tl.load(frequency_ptr + req_index) * counts.to(tl.float32)
    logits -= tl.load(presence_ptr + req_index) * has_output.to(tl.float32)
    tl.store(logits_ptr + row * stride_logits + tokens, logits, mask=mask)


@triton.jit
def _allow_kernel(
    logits_ptr, rows_ptr, bitmask_ptr, vocab_size, stride_logits, stride_bitmask, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    """One part of one row. Writes only forbidden tokens."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    words = tl.load(bitmask_ptr + tl.program_id(0).to(tl.int64) * stride_bitmask + tokens // 32, mask=mask, other=-1)
    is_forbidden = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits_ptr + row * stride_logits + tokens, float("-inf"), mask=mask & is_forbidden)
