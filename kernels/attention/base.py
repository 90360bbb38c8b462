"""The attention interface: AttentionMetadata of a step, the AttentionBackend protocol, and select_backend.

Rows are ragged: a decode row has one query token, a row of a prompt chunk has many. There is no other difference.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.elementwise.reference import UNSCALED, KVScales

logger = logging.getLogger(__name__)

LATENTS = 0  # as a number of KV heads: one, whose values are a part of its keys


@dataclass(frozen=True)
class SharedRows:
    """Which rows of one token of a step begin with the same blocks, as the host knows it of their requests.

    Every row of a group has the same entries of the block table for the group's tokens. A backend may read their keys
    and values once for all. Rows of more tokens, and those not longer than the group's tokens, are no part of a group.
    """

    # [R] int32 or int64: the request of each row
    req_index: torch.Tensor
    # [requests, 2] int32: the number of each request's group, from 1 on, 0: none; and the group's tokens
    shares: torch.Tensor
    max_groups: int  # the largest number


@dataclass
class GroupedRows:
    """The rows of a step by group, in tiles that attend together. All int32, on the device."""

    # [R, 4] of each row: its keys that its group shares, the pieces they are cut into, the first of these pieces, and
    # the row's place in its tile; zeros: it is in no group
    rows: torch.Tensor
    # [tiles * tile_rows] the rows of each tile, -1: none
    members: torch.Tensor
    # [N, 4] tile, first key, end, unused; end 0: no piece
    pieces: torch.Tensor
    tile_rows: int
    # [M, 4] of cut_rows: the keys behind the shared ones
    own_pieces: torch.Tensor | None = None


@dataclass
class AttentionMetadata:
    """The rows of one step, equal for every layer. R rows, T query tokens in all. All tensors int32 on the device."""

    # [R + 1] first query token of each row; the last entry is T
    query_start_loc: torch.Tensor
    # [R] tokens of each request including this step's
    seq_lens: torch.Tensor
    # [R, max_blocks] pool block of each block of the request. Entries past its last block, and before the first that a
    # layer's window or chunk reaches, are arbitrary valid ids: those blocks may hold anything, including NaN
    block_table: torch.Tensor
    # [T] int64: block_id * block_size + offset, where each query token's key and value are written
    slot_mapping: torch.Tensor
    # Host-side bounds (upper bounds where a CUDA graph serves several lengths)
    max_query_len: int
    max_seq_len: int
    # The first num_decodes rows have exactly one query token; None: rows of one token may be anywhere, and the
    # device must find them (a CUDA graph that serves many mixes)
    num_decodes: int | None
    # With num_decodes None: rows past the first max_prefills have at most one query token; None: no such bound.
    # A row of seq_len 0 is padding, however many query tokens it has: its output is zeros
    max_prefills: int | None = None
    # Query tokens and seq_len of each row, on the host; None: unknown (a CUDA graph), or nothing depends on them
    row_lens: Sequence[tuple[int, int]] | None = None
    # Data that the backend computed for all layers of the step (AttentionBackend.prepare), by number of KV heads;
    # LATENTS: of rows over latents
    decode_pieces: dict[int, torch.Tensor] | None = None
    # Of layers that see whole rows; None: no rows are grouped, in this step or in this block table
    shared: SharedRows | None = None
    # Data that the backend computed of `shared`, by a layer's query heads, KV heads and head size
    grouped_rows: dict[tuple[int, int, int], GroupedRows] | None = None
    # Data that layers of latent attention share in a step (kernels/attention/latent.py)
    latent_parts: Sequence[LatentPart] | None = None


@dataclass(frozen=True)
class LatentPart:
    """Neighbouring rows of a step whose latent attention is computed in one form."""

    tokens: slice  # of the step
    metadata: AttentionMetadata  # of these rows alone
    # [n] int64: blocks of the pool whose latents are expanded to keys and values; None: the absorbed form
    expanded: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """A model's requirements on attention, constant for its life."""

    num_heads: int  # query heads of this rank
    num_kv_heads: int  # of this rank; divides num_heads
    head_dim: int  # of queries and keys
    dtype: torch.dtype
    device: torch.device
    block_size: int | None = None  # tokens; None: the backend may choose
    # dtype of the pool: None is `dtype`; else FP8 or INT8 of kernels.elementwise.reference
    kv_dtype: torch.dtype | None = None
    value_head_dim: int | None = None  # None: head_dim
    has_sinks: bool = False  # some layer's softmax has a learned logit per head (`sinks` of forward)
    has_chunks: bool = False  # some layer sees only keys of the query's own block of positions (`chunk` of forward)
    frees_windows: bool = False  # blocks behind a window or chunk are given back, so another row may own them
    has_latents: bool = False  # the pool holds latents: values are the first numbers of keys, of one KV head

    @property
    def values_dim(self) -> int:
        """Return the head size of values and outputs."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def has_other_pool(self) -> bool:
        """Return True if the pool's dtype is not `dtype`, so keys and values are converted before use."""
        return self.kv_dtype not in (None, self.dtype)


class AttentionBackend(Protocol):
    """Paged attention over a pool of blocks. Stateless but for scratch buffers; never syncs the device."""

    name: str
    block_size_multiple: int
    groups_rows: bool  # AttentionMetadata.shared spares it reads; else it is ignored
    is_graph_safe: bool  # decode rows cause no sync and read no host value that changes

    @classmethod
    def refuse(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend cannot serve `spec`, in one sentence, or None if it can."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Compute data that a step's layers share, before the first layer. Optional: it only saves time. No sync."""
        ...

    def forward(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], this step's keys already written
        v_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, value_head_dim]
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,  # a token sees itself and the window - 1 tokens before it
        chunk: int | None = None,  # instead of a window: of the tokens before it, a token sees those of p // chunk
        softcap: float = 0.0,  # 0: off; else logits = softcap * tanh(logits / softcap)
        sinks: torch.Tensor | None = None,  # [num_heads] fp32: exp(sink) is added to each softmax's denominator
        kv_scales: KVScales = UNSCALED,  # of an FP8 or INT8 pool
    ) -> torch.Tensor:  # [T, num_heads, value_head_dim]
        """Causal attention of each row's queries over that row's own tokens.

        The caches may be views: only their last dimension must be dense.
        """
        ...


def select_backend(
    spec: AttentionSpec, backends: Sequence[type[AttentionBackend]], *, wanted: str = "auto"
) -> AttentionBackend:
    """Make the first backend that does not refuse `spec`, logging each refusal.

    wanted: a backend's name, or "auto". Raises ValueError naming every refusal when none is left.
    """
    candidates = [cls for cls in backends if wanted in ("auto", cls.name)]
    if not candidates:
        raise ValueError(
            f"unknown attention backend {wanted!r}: choose from auto, {', '.join(c.name for c in backends)}"
        )
    refusals: list[str] = []
    for cls in candidates:
        reason = cls.refuse(spec)
        if reason is None:
            return cls()
        logger.info("attention_backend=%s refused reason=%r", cls.name, reason)
        refusals.append(f"{cls.name}: {reason}")
    raise ValueError("no attention backend supports this model: " + "; ".join(refusals))
