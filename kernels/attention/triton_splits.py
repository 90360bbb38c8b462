# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Splits of decode attention: how many a row gets, the buffers in which they meet, and their merge.

Each split stores its normalised output and the log2 of its softmax denominator. The last to arrive at the counter of a
(row, KV head) pair weighs all of them, in order, and adds the pair's sinks to the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.attention.triton_common import MASKED, load_sinks
from kernels.attention.triton_cut_rows import MAX_SPLITS

_MAX_PIECES_PER_SM = 8
FEW_PAIRS = 16  # (row, KV head) pairs of one or two rows: limited by latency, not bandwidth


@dataclass(frozen=True)
class DecodeScratch:
    """Buffers in which the splits of a row are merged. One per stream: two launches in flight must not share it."""

    # [capacity, head_dim of values] fp32: normalised output of each split and query head
    partial: torch.Tensor
    # [capacity] fp32: log2 of each output's softmax denominator
    lse: torch.Tensor
    # [capacity] int32: splits arrived per (row, KV head); zero between launches
    arrivals: torch.Tensor
    num_sms: int
    warps_per_sm: int = 0  # of gluon_decode.py, if rows are cut for its programs and not for triton_decode.py's

    @classmethod
    def allocate(
        cls, *, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, warps_per_sm: int = 0
    ) -> DecodeScratch:
        """Allocate for any number of rows: splits shrink as rows grow, so their product is bounded.

        head_dim: of values.
        """
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
        # num_splits aims at 3 programs per SM and rounds up, so rows * KV heads * splits stays under twice that. Of cut
        # rows, those longer than a piece have fewer than twice as many pieces as their share of at most 8 per SM.
        # Layers of as many KV heads share pieces, whichever kernel these were cut for
        num_programs = 2 * _MAX_PIECES_PER_SM * num_sms + 2 * num_kv_heads
        num_entries = num_programs * (num_heads // num_kv_heads)
        return cls(
            partial=torch.empty(num_entries, head_dim, dtype=torch.float32, device=device),
            lse=torch.empty(num_entries, dtype=torch.float32, device=device),
            arrivals=torch.zeros(num_programs, dtype=torch.int32, device=device),
            num_sms=num_sms,
            warps_per_sm=warps_per_sm,
        )

    def num_splits(self, *, num_pairs: int) -> int:
        """Return the splits of each of num_pairs (row, KV head) pairs, on the host: 1 once pairs fill the device."""
        if num_pairs <= FEW_PAIRS:
            return max(1, min(MAX_SPLITS, self.num_sms // num_pairs))
        return min(MAX_SPLITS, -(-3 * self.num_sms // num_pairs))

    def num_pieces(self, *, num_rows: int, num_kv_heads: int) -> int:
        """Return how many pieces of num_rows rows run at once, one program per KV head, limited by an SM's memory."""
        num_pairs = num_rows * num_kv_heads
        per_sm = 1 if num_pairs <= FEW_PAIRS else 3 if self.num_splits(num_pairs=num_pairs) > 1 else 4
        if self.warps_per_sm and num_pairs > FEW_PAIRS:
            per_sm = self.warps_per_sm // warps_of_pairs(num_pairs, num_sms=self.num_sms)
        return max(1, per_sm * self.num_sms // num_kv_heads)


def warps_of_pairs(num_pairs: int, *, num_sms: int) -> int:
    """Return the warps of a program of gluon_decode.py: pairs that fill the device have one each, fewer share them.

    Few long programs have fewer starts, in which no load is in flight.
    """
    return 1 if num_pairs >= 8 * num_sms else 2 if num_pairs >= 3 * num_sms else 4


@triton.jit
def meet_splits(
    acc, lse, out_row_ptr, partial_ptr, lse_ptr, arrivals_ptr, sinks_ptr, shared, entries, split, used_splits,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_G: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SHARED_M: tl.constexpr,
) -> None:  # fmt: skip
    """Store this split's result; the last split of the (row, KV head) pair to arrive merges them all."""
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, D_PAD)
    mine = entries + split * GROUP + heads
    in_tile = (heads < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(partial_ptr + mine[:, None] * VALUE_DIM + dims[None, :], acc, mask=in_tile)
    tl.store(lse_ptr + mine, lse, mask=heads < GROUP)
    # Every thread's stores before the one thread's release; its acquire before every thread's loads
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    tl.device_assert(arrived < used_splits, "arrivals were not zero before the launch")  # with TRITON_DEBUG=1
    if arrived == used_splits - 1:
        tl.store(arrivals_ptr, 0)
        _merge_splits(
            out_row_ptr, partial_ptr, lse_ptr, sinks_ptr, shared, entries, used_splits,
            GROUP, VALUE_DIM, D_PAD, MAX_SPLITS, SHARED_M,
        )  # fmt: skip


@triton.jit
def _merge_splits(
    out_row_ptr, partial_ptr, lse_ptr, sinks_ptr, shared, entries, used_splits,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SHARED_M: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one (row, KV head) by their denominators. Loads skip L1: other SMs wrote the data."""
    G_PAD: tl.constexpr = triton.next_power_of_2(GROUP)
    CHUNK: tl.constexpr = max(1, 8192 // (G_PAD * D_PAD))
    heads = tl.arange(0, G_PAD)
    dims = tl.arange(0, D_PAD)
    splits = tl.arange(0, MAX_SPLITS)
    all_lse = tl.load(
        lse_ptr + entries + splits[:, None] * GROUP + heads[None, :],
        mask=(splits < used_splits)[:, None] & (heads < GROUP)[None, :], other=MASKED, cache_modifier=".cg",
    )  # fmt: skip
    maximum = tl.max(all_lse, 0)
    total = tl.sum(tl.exp2(all_lse - maximum[None, :]), 0)
    if sinks_ptr is not None and SHARED_M == 0:  # once for all splits
        total += tl.exp2(load_sinks(sinks_ptr, heads, heads < GROUP) - maximum)
    acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    for start in range(0, used_splits, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        live = (chunk < used_splits)[:, None] & (heads < GROUP)[None, :]
        rows = entries + chunk[:, None] * GROUP + heads[None, :]
        lse = tl.load(lse_ptr + rows, mask=live, other=MASKED, cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + rows[:, :, None] * VALUE_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < VALUE_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        acc += tl.sum(parts * tl.exp2(lse - maximum[None, :])[:, :, None], 0)
    mask = (heads < GROUP)[:, None] & (dims < VALUE_DIM)[None, :]
    acc = acc / total[:, None]
    if SHARED_M > 0:
        lse = maximum + tl.log2(total)
        acc, lse = add_shared(acc, lse, shared, GROUP, VALUE_DIM, D_PAD, G_PAD, SHARED_M)
        if sinks_ptr is not None:
            acc = acc / (1.0 + tl.exp2(load_sinks(sinks_ptr, heads, heads < GROUP) - lse))[:, None]
    tl.store(out_row_ptr + heads[:, None] * VALUE_DIM + dims[None, :], acc.to(out_row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_shared(
    acc, lse, shared, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, SIZE: tl.constexpr,
    SHARED_M: tl.constexpr,
):  # fmt: skip
    """Add a row's attention over shared keys to that over its own, acc [SIZE, D_PAD] and lse [SIZE], without sinks."""
    shared_rows_ptr, shared_ptr, shared_lse_ptr, row, kv_head, num_kv_heads = shared
    splits = tl.load(shared_rows_ptr + row * 4 + 1)
    first = tl.load(shared_rows_ptr + row * 4 + 2)
    place = tl.load(shared_rows_ptr + row * 4 + 3)
    heads = tl.arange(0, SIZE)
    dims = tl.arange(0, D_PAD)
    CHUNK: tl.constexpr = max(1, 4096 // (SIZE * D_PAD))  # pieces at once, since each waits for its loads
    for start in tl.range(0, splits, CHUNK, num_stages=3):
        chunk = start + tl.arange(0, CHUNK)
        live = (chunk < splits)[:, None] & (heads < GROUP)[None, :]
        entries = ((first + chunk) * num_kv_heads + kv_head).to(tl.int64) * SHARED_M + place * GROUP
        entries = entries[:, None] + heads[None, :]
        its_lse = tl.load(shared_lse_ptr + entries, mask=live, other=MASKED)
        parts = tl.load(
            shared_ptr + entries[:, :, None] * VALUE_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < VALUE_DIM)[None, None, :], other=0.0,
        )  # fmt: skip
        maximum = tl.maximum(lse, tl.max(its_lse, 0))
        mine = tl.exp2(lse - maximum)
        its = tl.exp2(its_lse - maximum[None, :])
        total = mine + tl.sum(its, 0)
        acc = (acc * mine[:, None] + tl.sum(parts * its[:, :, None], 0)) / total[:, None]
        lse = maximum + tl.log2(total)
    return acc, lse
