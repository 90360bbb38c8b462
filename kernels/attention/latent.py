"""Latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, §2.1) on paged latents, over any AttentionBackend.

A head's keys and values are products with one latent of each token, which gives two forms of one result.
Absorbed: the product with the key matrix is moved to the query, that with the value matrix behind attention; keys are
the latents themselves. Nothing is made per token of context, so it is the form of decode rows.
Expanded: keys and values of each head are made from the latents, context included, and attention is as in any model,
with heads of nope_dim + rope_dim and v_head_dim numbers instead of 2 * rank + rope_dim for two products.

The rule: of q query tokens over s tokens, each pair of a query and a key costs a head 2 * rank + rope_dim
multiplications absorbed, and nope_dim + rope_dim + v_head_dim expanded. Absorbing queries and outputs costs a head
rank * (nope_dim + v_head_dim) for each query, expanding as much for each token of s. A row is expanded if that takes
fewer multiplications, and a step has expanded rows if they spare enough to pay for more launches (LEAST_SPARED).

Expanded rows are cut into groups, and their heads into pieces, such that one piece of keys and values takes at most
PIECE_BYTES: heads are independent, so no partial results need merging, and the memory is bounded for long contexts. One
head of one row is never cut: 140 MiB for 163,840 tokens of DeepSeek-V3 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from kernels.attention.base import AttentionBackend, AttentionMetadata, LatentPart
from kernels.elementwise.reference import FP8, UNSCALED, KVScales, from_fp8

PIECE_BYTES = 256 << 20
_FEWEST_HEADS = 8  # of a piece of a group of several rows, so that its programs fill a GPU
# Floating point operations of a layer. On a GPU the launches of a step without a graph take as long as about this many
LEAST_SPARED = 20e9
# Two pieces for each of two programs on 160 multiprocessors, of 256 tokens x heads each (triton_latent_splits.py)
_SCRATCH_ENTRIES = 2 * 2 * 160 * 256
_PAGE = 64  # tokens of a block of expanded keys: what the Hopper kernel loads at once


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a layer on one rank, as they decide between the two forms."""

    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    v_head_dim: int

    def spared_flops(self, query_len: int, seq_len: int) -> float:
        """Return how many operations the expanded form spares a row; negative: it takes more. 0 for padding."""
        if seq_len < query_len:
            return 0.0
        context_len = seq_len - query_len
        pairs = query_len * context_len + query_len * (query_len + 1) / 2
        per_pair = 2 * self.rank - self.nope_dim - self.v_head_dim
        per_context = self.rank * (self.nope_dim + self.v_head_dim)
        return 2.0 * self.num_heads * (pairs * per_pair - context_len * per_context)

    def step_bytes(self, seq_len: int, itemsize: int) -> int:
        """Return the most memory of a step on a GPU, beside what is held for each of its tokens.

        Expanded keys and values of one call, the latents that they are made from (also as an fp8 pool holds them), and
        the outputs of pieces of rows.
        seq_len: of the longest row; itemsize: of the model's dtype.
        """
        tokens = max(seq_len, PIECE_BYTES // (_head_bytes(self, itemsize) * min(_FEWEST_HEADS, self.num_heads)))
        latents = tokens * (self.rank + self.rope_dim) * (itemsize + 1)
        expanded = max(PIECE_BYTES, seq_len * _head_bytes(self, itemsize))
        return expanded + latents + _SCRATCH_ENTRIES * (self.rank + 1) * 4

    def expands(self, row_lens: Sequence[tuple[int, int]], *, is_cuda: bool) -> bool:
        """Return True if a step of these rows, (query tokens, seq_len) each, has expanded rows."""
        spared = sum(max(0.0, self.spared_flops(*lens)) for lens in row_lens)
        return spared > (LEAST_SPARED if is_cuda else 0.0)


@dataclass(frozen=True)
class LatentHeads:
    """The matrices of a layer's heads of one rank, in the model's dtype."""

    to_keys: torch.Tensor  # [H, nope_dim, rank]
    to_values: torch.Tensor  # [H, rank, v_head_dim]

    def sizes(self, rope_dim: int) -> LatentSizes:
        """Return the layer's sizes."""
        num_heads, nope_dim, rank = self.to_keys.shape
        return LatentSizes(num_heads, rank, rope_dim, nope_dim, self.to_values.shape[2])


def latent_attention(
    backend: AttentionBackend,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    heads: LatentHeads,
    metadata: AttentionMetadata,
    *,
    scale: float,
    kv_scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """Return the attention of all rows of a step, [T, H, v_head_dim]. Never syncs where the backend does not.

    q_nope: [T, H, nope_dim]; q_rope: [T, H, rope_dim], rotated; cache: [num_blocks, block_size, 1, rank + rope_dim],
    this step's latents already written, in q's dtype or fp8 with kv_scales, of which k and v are equal.
    """
    sizes = heads.sizes(q_rope.shape[2])
    parts = metadata.latent_parts
    if parts is None:
        lens = metadata.row_lens
        if lens is None or not sizes.expands(lens, is_cuda=cache.is_cuda):
            return _absorbed(backend, q_nope, q_rope, cache, heads, metadata, scale=scale, kv_scales=kv_scales)
        parts = list(_parts(backend, metadata, sizes, cache.shape[1], heads.to_keys.dtype))
        metadata.latent_parts = parts
    outs = []
    for part in parts:
        queries = q_nope[part.tokens], q_rope[part.tokens]
        if part.expanded is None:
            outs.append(_absorbed(backend, *queries, cache, heads, part.metadata, scale=scale, kv_scales=kv_scales))
        else:
            latents = _gather(cache, part.expanded, q_nope.dtype, kv_scales)
            outs.append(_expanded(backend, *queries, latents, heads, part.metadata, scale=scale))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _parts(
    backend: AttentionBackend,
    metadata: AttentionMetadata,
    sizes: LatentSizes,
    block_size: int,
    dtype: torch.dtype,
) -> Iterator[LatentPart]:
    """Yield the rows of a step, in order, by their form."""
    lens = metadata.row_lens
    assert lens is not None
    token = 0
    for first, end, is_expanded in _runs(lens, sizes, head_bytes=_head_bytes(sizes, dtype.itemsize)):
        start, token = token, token + sum(query_len for query_len, _ in lens[first:end])
        tokens = slice(start, token)
        if start == token:
            continue
        if is_expanded:
            yield _expanded_part(metadata, tokens, first, end, block_size=block_size)
        else:
            part = _rows_of(metadata, tokens, first, end)
            backend.prepare(part)
            yield LatentPart(tokens, part)


def _runs(lens: Sequence[tuple[int, int]], sizes: LatentSizes, *, head_bytes: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (first row, end, is expanded) of neighbouring rows in one form; expanded ones in groups of bounded size."""
    most_tokens = PIECE_BYTES // (head_bytes * min(_FEWEST_HEADS, sizes.num_heads))
    first, held = 0, 0  # tokens of the rows from first on
    forms = [sizes.spared_flops(*row) > 0 for row in lens]
    for row, (_, seq_len) in enumerate(lens):
        if row > first and (forms[row] != forms[first] or (forms[row] and held + seq_len > most_tokens)):
            yield first, row, forms[first]
            first, held = row, 0
        held += seq_len
    yield first, len(lens), forms[first]


def _head_bytes(sizes: LatentSizes, itemsize: int) -> int:
    """Return the bytes of a token's expanded key and value of one head, while they are made."""
    return (2 * sizes.nope_dim + sizes.rope_dim + sizes.v_head_dim) * itemsize


def _rows_of(metadata: AttentionMetadata, tokens: slice, first: int, end: int) -> AttentionMetadata:
    """Return the metadata of rows [first, end) alone."""
    assert metadata.row_lens is not None
    lens = metadata.row_lens[first:end]
    max_query_len = max(query_len for query_len, _ in lens)
    num_prefills = max((row + 1 for row, (query_len, _) in enumerate(lens) if query_len != 1), default=0)
    return replace(
        metadata,
        query_start_loc=metadata.query_start_loc[first : end + 1] - tokens.start,
        seq_lens=metadata.seq_lens[first:end],
        block_table=metadata.block_table[first:end],
        slot_mapping=metadata.slot_mapping[tokens],
        max_query_len=max_query_len,
        max_seq_len=max(seq_len for _, seq_len in lens),
        num_decodes=None if num_prefills else end - first,
        max_prefills=num_prefills or None,
        row_lens=lens,
        decode_pieces=None,
    )


def _expanded_part(metadata: AttentionMetadata, tokens: slice, first: int, end: int, *, block_size: int) -> LatentPart:
    """Return rows [first, end) whose blocks are gathered one behind the other and seen as pages of _PAGE tokens."""
    rows = _rows_of(metadata, tokens, first, end)
    assert rows.row_lens is not None
    page = _page(block_size)
    blocks = []
    for row, (_, seq_len) in enumerate(rows.row_lens):
        used = rows.block_table[row, : -(-seq_len // block_size)]
        missing = -(-seq_len // page) * (page // block_size) - used.shape[0]
        blocks.append(functional.pad(used, (0, missing)))  # of any block: their tokens are behind the row's end
    expanded = torch.cat(blocks).long()
    num_pages = (rows.seq_lens + page - 1) // page
    num_columns = -(-rows.max_seq_len // page)
    table = (num_pages.cumsum(0) - num_pages)[:, None] + torch.arange(num_columns, device=num_pages.device)
    table = table.clamp(max=max(expanded.shape[0] * block_size // page - 1, 0)).to(torch.int32)
    # Behind the table's end a kernel may read as many entries as there are in 64 bytes
    table = functional.pad(table, (0, -num_columns % 16))
    metadata = replace(rows, block_table=table, num_decodes=0, max_prefills=None)
    return LatentPart(tokens, metadata, expanded)


def _page(block_size: int) -> int:
    """Return the tokens of a page of expanded keys: _PAGE, if blocks fill it."""
    return _PAGE if _PAGE % block_size == 0 else block_size


def _gather(cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype, kv_scales: KVScales) -> torch.Tensor:
    """Return the latents of blocks in a dtype, [pages, tokens of a page, rank + rope_dim]."""
    is_fp8 = cache.dtype == FP8
    # some torch builds cannot gather fp8 on every device
    latents = (cache.view(torch.uint8) if is_fp8 else cache).index_select(0, blocks)
    if is_fp8:
        latents = from_fp8(latents.view(FP8), dtype).mul_(kv_scales.k)
    return latents.view(-1, _page(cache.shape[1]), cache.shape[3])


def _absorbed(
    backend: AttentionBackend,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    heads: LatentHeads,
    metadata: AttentionMetadata,
    *,
    scale: float,
    kv_scales: KVScales,
) -> torch.Tensor:
    """Attend over the latents themselves; see latent_attention."""
    absorbed = torch.bmm(q_nope.transpose(0, 1), heads.to_keys).transpose(0, 1)
    queries = torch.cat((absorbed, q_rope), dim=-1)
    values = cache[..., : heads.to_keys.shape[2]]
    out = backend.forward(queries, cache, values, metadata, scale=scale, kv_scales=kv_scales)
    return torch.bmm(out.transpose(0, 1), heads.to_values).transpose(0, 1)


def _expanded(
    backend: AttentionBackend,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    heads: LatentHeads,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend over keys and values of each head, made from the latents a few heads at a time; see latent_attention."""
    num_heads, nope_dim, rank = heads.to_keys.shape
    v_head_dim = heads.to_values.shape[2]
    queries = torch.cat((q_nope, q_rope), dim=-1)
    compressed, k_rope = latents[..., :rank], latents[..., None, rank:]
    head_bytes = latents.shape[:2].numel() * _head_bytes(heads.sizes(q_rope.shape[2]), latents.dtype.itemsize)
    most_heads = max(1, PIECE_BYTES // head_bytes)
    num_pieces = -(-num_heads // most_heads)
    size = -(-num_heads // num_pieces)
    outs = []
    for first in range(0, num_heads, size):
        piece = slice(first, min(first + size, num_heads))
        to_keys = heads.to_keys[piece].flatten(0, 1)
        to_values = heads.to_values[piece].transpose(1, 2).flatten(0, 1)
        k_nope = functional.linear(compressed, to_keys).unflatten(-1, (-1, nope_dim))
        keys = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:3], -1)), dim=-1)
        values = functional.linear(compressed, to_values).unflatten(-1, (-1, v_head_dim))
        outs.append(backend.forward(queries[:, piece], keys, values, metadata, scale=scale))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
