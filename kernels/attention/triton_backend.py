"""TritonAttention: the AttentionBackend over the Triton kernels. Without Triton it imports and refuses every spec."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.attention.base import LATENTS, AttentionMetadata, AttentionSpec, GroupedRows
from kernels.dispatch import HAS_TRITON
from kernels.elementwise.reference import FP8, UNSCALED, KVScales

if HAS_TRITON:
    from kernels.attention.triton_cut_rows import cut_rows
    from kernels.attention.triton_decode import decode_attention
    from kernels.attention.triton_group_rows import group_rows
    from kernels.attention.triton_latent import latent_attention
    from kernels.attention.triton_latent_splits import LatentScratch
    from kernels.attention.triton_prefill import prefill_attention
    from kernels.attention.triton_shared import MAX_SHARED_HEAD_DIM, SharedParts, shared_attention, shared_config
    from kernels.attention.triton_splits import DecodeScratch
try:
    from kernels.attention import gluon_decode
    from kernels.attention.gluon_prefill import hopper_prefill_attention, new_tickets, takes

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 576  # of latent attention, whose values have 512
_MAX_GROUP = 32
_LATENT_CAPABILITY = 9  # for the shared memory of a multiprocessor
_Shape = tuple[int, int, int, torch.device]  # query heads, KV heads, head size of values, device


class TritonAttention:
    """Split-KV decode for rows of one query token, ragged prefill for the rest. Owns the splits' scratch buffers.

    Latents have kernels of their own, for any number of query heads. One instance serves one stream. Its first forward
    of each shape of layer allocates, so it must not run inside a graph capture.
    """

    name = "triton"
    block_size_multiple = 16
    groups_rows = True
    is_graph_safe = True

    def __init__(self) -> None:
        self._scratches: dict[_Shape, DecodeScratch] = {}
        self._cuts: dict[int, DecodeScratch] = {}  # by KV heads of layers that see whole rows, whose keys are cut
        # KV heads of layers that see whole rows and are not grouped in steps with groups; and those that are, with
        # query heads, KV heads, head size
        self._lone: dict[int, DecodeScratch] = {}
        self._grouped: dict[tuple[int, int, int], tuple[DecodeScratch, torch.dtype]] = {}
        self._latents: LatentScratch | None = None  # of layers whose values are a part of their keys
        self._knows_device = False  # no forward has looked at it yet
        self._pdl = False
        self._tickets: torch.Tensor | None = None  # counters of the Hopper prefill kernel, if it can run

    @classmethod
    def refuse(cls, spec: AttentionSpec) -> str | None:
        """Refuse specs that the kernels do not support."""
        if not HAS_TRITON:
            return "the package triton is not installed"
        if spec.device.type != "cuda":
            return f"it needs a CUDA device, not {spec.device.type}"
        if spec.dtype not in _DTYPES:
            return f"dtype {spec.dtype} is not one of bfloat16, float16, float32"
        if max(spec.head_dim, spec.values_dim) > _MAX_HEAD_DIM:
            return f"head_dim {max(spec.head_dim, spec.values_dim)} is above {_MAX_HEAD_DIM}"
        if spec.num_heads % spec.num_kv_heads != 0:
            return f"num_heads {spec.num_heads} is not a multiple of num_kv_heads {spec.num_kv_heads}"
        if spec.num_heads // spec.num_kv_heads > _MAX_GROUP and not spec.has_latents:
            return f"{spec.num_heads // spec.num_kv_heads} query heads per KV head are above {_MAX_GROUP}"
        if spec.has_latents and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(spec.device)
            if major < _LATENT_CAPABILITY:
                return f"its tiles of latents need compute capability {_LATENT_CAPABILITY}.0, not {major}.{minor}"
        if spec.block_size is not None and (spec.block_size < 16 or spec.block_size & (spec.block_size - 1)):
            return f"block_size {spec.block_size} is not a power of two of at least 16"
        return None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Cut the decode rows' keys into pieces, once a first forward has shown the numbers of heads."""
        if self._latents is not None:
            metadata.decode_pieces = {LATENTS: self._latents.cut(metadata)}
        for num_kv_heads in self._cuts if metadata.shared is None else self._lone:
            self._cut(metadata, num_kv_heads)
        if metadata.shared is not None:
            for heads in self._grouped:
                self._group(metadata, heads)

    def _cut(self, metadata: AttentionMetadata, num_kv_heads: int) -> None:
        is_mixed = metadata.num_decodes is None
        num_rows = metadata.seq_lens.shape[0] if metadata.num_decodes is None else metadata.num_decodes
        if num_rows > 1:
            metadata.decode_pieces = (metadata.decode_pieces or {}) | {
                num_kv_heads: cut_rows(
                    metadata.seq_lens[:num_rows],
                    num_pieces=self._cuts[num_kv_heads].num_pieces(num_rows=num_rows, num_kv_heads=num_kv_heads),
                    query_start_loc=metadata.query_start_loc if is_mixed else None,
                )
            }

    def _pieces(self, metadata: AttentionMetadata, num_kv_heads: int, scratch: DecodeScratch) -> torch.Tensor | None:
        """Return the pieces of the keys of a layer that sees whole rows; None: a single row is not cut."""
        known = self._cuts if metadata.shared is None else self._lone
        if num_kv_heads not in known:  # prepare() did not know this number of heads
            known[num_kv_heads] = scratch
            self._cuts.setdefault(num_kv_heads, scratch)  # what graphs were captured with stays
            self._cut(metadata, num_kv_heads)  # without pieces another kernel would be compiled
        return (metadata.decode_pieces or {}).get(num_kv_heads)

    def _group(self, metadata: AttentionMetadata, heads: tuple[int, int, int]) -> GroupedRows:
        """Group the rows of a step for the layers with these heads."""
        assert metadata.shared is not None
        num_heads, num_kv_heads, head_dim = heads
        scratch, dtype = self._grouped[heads]
        num_rows = metadata.seq_lens.shape[0] if metadata.num_decodes is None else metadata.num_decodes
        starts = metadata.query_start_loc if metadata.num_decodes is None else None
        seq_lens, group = metadata.seq_lens[:num_rows], num_heads // num_kv_heads
        config = shared_config(head_dim, dtype, num_queries=num_rows * group)
        grouped = group_rows(
            metadata.shared, seq_lens,
            tile_rows=config.block_m // group, query_start_loc=starts,
            num_pieces=max(1, config.per_sm * scratch.num_sms // num_kv_heads),
        )  # fmt: skip
        num_pieces = replace(scratch, warps_per_sm=0).num_pieces(num_rows=num_rows, num_kv_heads=num_kv_heads)
        grouped.own_pieces = cut_rows(seq_lens, num_pieces=num_pieces, query_start_loc=starts, shared_rows=grouped.rows)
        metadata.grouped_rows = (metadata.grouped_rows or {}) | {heads: grouped}
        return grouped

    def _attend_shared(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scratch: DecodeScratch,
        *,
        scale: float,
        softcap: float,
        kv_scales: KVScales,
    ) -> SharedParts | None:
        """Attend grouped rows over their shared keys; None: this step or layer has no groups."""
        num_kv_heads, head_dim = k_cache.shape[2], max(k_cache.shape[3], v_cache.shape[3])
        num_rows = metadata.seq_lens.shape[0] if metadata.num_decodes is None else metadata.num_decodes
        if metadata.shared is None or num_rows < 2 or head_dim > MAX_SHARED_HEAD_DIM:
            return None
        heads = (q.shape[1], num_kv_heads, head_dim)
        self._grouped.setdefault(heads, (scratch, q.dtype))
        grouped = (metadata.grouped_rows or {}).get(heads) or self._group(metadata, heads)
        config = shared_config(head_dim, q.dtype, num_queries=num_rows * (q.shape[1] // num_kv_heads))
        return shared_attention(
            q, k_cache, v_cache, metadata.block_table, grouped, config, scale=scale, softcap=softcap,
            kv_scales=kv_scales, pdl=self._pdl,
            query_start_loc=metadata.query_start_loc if metadata.num_decodes is None else None,
        )  # fmt: skip

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        chunk: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """Attend each row over its own tokens; see AttentionBackend.forward. A padding row (seq_len 0) yields zeros."""
        if not self._knows_device:
            self._look_at(q, k_cache)
        if _are_latents(k_cache, v_cache):
            assert (sliding_window, chunk, softcap, sinks) == (None, None, 0.0, None), "no model of latents has them"
            return self._attend_latents(q, k_cache, v_cache, metadata, scale=scale, kv_scales=kv_scales)
        out = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=q.dtype, device=q.device)
        num_decodes = metadata.num_decodes or 0
        is_mixed = metadata.num_decodes is None  # decode rows may be anywhere
        if num_decodes > 0 or is_mixed:
            scratch = self._scratch_for(q, k_cache, v_cache)
            shared = pieces = None
            if sliding_window is None and chunk is None:
                shared = self._attend_shared(
                    q, k_cache, v_cache, metadata, scratch, scale=scale, softcap=softcap, kv_scales=kv_scales
                )
                pieces = self._pieces(metadata, k_cache.shape[2], scratch) if shared is None else shared.own_pieces
            rows = slice(None) if is_mixed else slice(num_decodes)
            attend: Callable[..., None] = partial(decode_attention, shared=shared)
            if self._tickets is not None and shared is None and gluon_decode.takes(q, k_cache, v_cache):
                attend = gluon_decode.decode8_attention
            attend(
                q[rows], k_cache, v_cache, metadata.block_table, metadata.seq_lens, out[rows], scratch,
                scale=scale, sliding_window=sliding_window, chunk=chunk, softcap=softcap, sinks=sinks,
                kv_scales=kv_scales, query_start_loc=metadata.query_start_loc if is_mixed else None,
                max_seq_len=metadata.max_seq_len, pieces=pieces, pdl=self._pdl,
            )  # fmt: skip
        num_rows = metadata.seq_lens.shape[0]
        if num_rows > num_decodes:
            end = num_rows if metadata.max_prefills is None else metadata.max_prefills
            row_starts, seq_lens = metadata.query_start_loc[: end + 1], metadata.seq_lens[:end]
            if self._tickets is not None and takes(
                q, k_cache, v_cache, sliding_window=sliding_window, chunk=chunk, softcap=softcap
            ):
                hopper_prefill_attention(
                    q, k_cache, v_cache, metadata.block_table, row_starts, seq_lens, out, self._tickets,
                    scale=scale, max_seq_len=metadata.max_seq_len, first_row=num_decodes, skips_decodes=is_mixed,
                    sliding_window=sliding_window, chunk=chunk, softcap=softcap, sinks=sinks, kv_scales=kv_scales,
                    pdl=self._pdl,
                )  # fmt: skip
            else:
                prefill_attention(
                    q, k_cache, v_cache, metadata.block_table, row_starts, seq_lens, out,
                    scale=scale, max_query_len=metadata.max_query_len, first_row=num_decodes, skips_decodes=is_mixed,
                    sliding_window=sliding_window, chunk=chunk, softcap=softcap, sinks=sinks, kv_scales=kv_scales,
                    pdl=self._pdl,
                )  # fmt: skip
        return out

    def _attend_latents(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        kv_scales: KVScales,
    ) -> torch.Tensor:
        """Attend over latents, whose first numbers are the values."""
        num_heads, rank = q.shape[1], values.shape[3]
        if self._latents is None:
            # Other graphs that share the buffers would be captured with their own
            assert not _is_capturing(q), "run one forward before capturing"
            self._latents = LatentScratch.allocate(num_heads=num_heads, rank=rank, dtype=q.dtype, device=q.device)
        pieces = (metadata.decode_pieces or {}).get(LATENTS)
        if pieces is None:
            pieces = self._latents.cut(metadata)
            metadata.decode_pieces = {LATENTS: pieces}
        out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
        latent_attention(
            q, cache, metadata, out, self._latents, pieces, scale=scale, kv_scales=kv_scales, pdl=self._pdl
        )
        return out

    def _scratch_for(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> DecodeScratch:
        """Return the buffers for a layer of this shape, allocated once for any number of rows."""
        shape = (q.shape[1], k_cache.shape[2], v_cache.shape[3], q.device)
        if shape not in self._scratches:
            # Only this graph would zero its counters, not another graph that shares them
            assert not _is_capturing(q), "run one forward before capturing"
            has_own_kernel = self._tickets is not None and gluon_decode.takes(q, k_cache, v_cache)
            self._scratches[shape] = DecodeScratch.allocate(
                num_heads=q.shape[1], num_kv_heads=k_cache.shape[2], head_dim=v_cache.shape[3], device=q.device,
                warps_per_sm=gluon_decode.WARPS_PER_SM if has_own_kernel else 0,
            )  # fmt: skip
        return self._scratches[shape]

    def _look_at(self, q: torch.Tensor, k_cache: torch.Tensor) -> None:
        """Find out what the device can do, at the first forward."""
        self._knows_device = True
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
        self._pdl = capability >= (9, 0)
        self._tickets = new_tickets(q.device) if HAS_GLUON and capability[0] == 9 else None
        is_taken = k_cache.dtype == q.dtype or (k_cache.dtype == FP8 and q.shape[2] <= 128)
        if self._tickets is not None and not is_taken:
            logger.info(
                "attention_prefill=gluon refused reason=%r",
                f"its pool must hold {q.dtype}, or e4m3 of heads of at most 128, not {k_cache.dtype} of {q.shape[2]}",
            )


def _is_capturing(q: torch.Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _are_latents(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return True if the values are the first numbers of the keys, of one KV head."""
    return k_cache.shape[2] == 1 and v_cache.data_ptr() == k_cache.data_ptr() and v_cache.shape[3] < k_cache.shape[3]
