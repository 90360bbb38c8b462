"""TorchAttention: paged attention in plain torch, the oracle of every other backend, and the backend for CPU and MPS.

Decode rows are computed by one batched gather and one SDPA call, so they cost no Python per row. The other rows are
computed one by one; their lengths are read on the host, which syncs a GPU. GPU serving uses another backend.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from kernels.attention.base import AttentionMetadata, AttentionSpec
from kernels.elementwise.reference import FP8, UNSCALED, KVScales, from_fp8


class TorchAttention:
    """AttentionBackend over gathered pages. Its only state is the buffer for gathered pages."""

    name = "torch"
    block_size_multiple = 1
    is_graph_safe = False  # the gather is as wide as the bound, so a graph would always compute the longest length

    def __init__(self) -> None:
        self._keys = _Scratch()
        self._values = _Scratch()

    @classmethod
    def refuse(cls, spec: AttentionSpec) -> str | None:
        """Refuse only head counts that are invalid for grouped-query attention."""
        if spec.num_heads % spec.num_kv_heads != 0:
            return f"num_heads {spec.num_heads} is not a multiple of num_kv_heads {spec.num_kv_heads}"
        return None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Do nothing: see AttentionBackend.prepare."""

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float = 0.0,
        kv_scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """Attend each row over its own tokens; see AttentionBackend.forward for shapes.

        A padding row (seq_len 0) yields zeros. FP8 is exact in every dtype of q, so the scales are applied where they
        touch the fewest numbers: in the logits' scale, and in the output.
        """
        scale *= kv_scales.k
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        decodes, others = _split_rows(metadata)
        if len(decodes):
            first = 0 if decodes.start == 0 else q.shape[0] - len(decodes)  # of their tokens
            rows, tokens = slice(decodes.start, decodes.stop), slice(first, first + len(decodes))
            tables = metadata.block_table[rows]
            out[tokens] = _attend_decodes(
                q[tokens],
                self._keys.gather(k_cache, tables, metadata.max_seq_len, q.dtype),
                self._values.gather(v_cache, tables, metadata.max_seq_len, q.dtype),
                metadata.seq_lens[rows],
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
            )
        if not len(others):
            return _scaled(out, kv_scales.v)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row in others:
            start, end, length = starts[row], starts[row + 1], lengths[row]
            if length == 0:
                out[start:end] = 0
                continue
            table = metadata.block_table[row : row + 1]
            out[start:end] = _attend_row(
                q[start:end],
                self._keys.gather(k_cache, table, length, q.dtype)[0],
                self._values.gather(v_cache, table, length, q.dtype)[0],
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
            )
        return _scaled(out, kv_scales.v)


def _scaled(out: torch.Tensor, scale: float) -> torch.Tensor:
    return out if scale == 1.0 else out.mul_(scale)


def _split_rows(metadata: AttentionMetadata) -> tuple[range, range]:
    """Return the rows that certainly have one token each, first or last of all, and the other rows."""
    num_rows = metadata.seq_lens.shape[0]
    if metadata.num_decodes is not None:
        return range(metadata.num_decodes), range(metadata.num_decodes, num_rows)
    num_prefills = num_rows if metadata.max_prefills is None else metadata.max_prefills
    num_tokens = int(metadata.query_start_loc[-1] - metadata.query_start_loc[num_prefills])
    if num_tokens < num_rows - num_prefills:  # some rows have no token
        num_prefills = num_rows
    return range(num_prefills, num_rows), range(num_prefills)


class _Scratch:
    """Buffer for gathered pages. Kept between calls on CPU, where fresh pages of memory cost more than the copy.

    On other devices the caching allocator reuses memory. Under CUDA graphs a growing buffer would leave earlier graphs
    with a dangling pointer.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, num_tokens: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Gather the first num_tokens tokens of each row's blocks, FP8 as dtype, as a view [N, Hkv, num_tokens, D].

        cache: [num_blocks, block_size, Hkv, D]; block_table: [N, max_blocks]. Valid until the next call.
        """
        num_rows = block_table.shape[0]
        _, block_size, num_kv_heads, head_dim = cache.shape
        num_blocks = min(-(-num_tokens // block_size), block_table.shape[1])
        block_ids = block_table[:, :num_blocks].flatten()
        is_fp8 = cache.dtype == FP8
        cache = cache.view(torch.uint8) if is_fp8 else cache  # some torch builds cannot gather fp8 on every device
        if cache.device.type == "cpu":
            pages = self._reserve(cache, block_ids.shape[0])
            torch.index_select(cache, 0, block_ids, out=pages)
        else:
            pages = cache.index_select(0, block_ids)
        if is_fp8:
            pages = from_fp8(pages.view(FP8), dtype)
        tokens = pages.view(num_rows, num_blocks * block_size, num_kv_heads, head_dim)
        return tokens[:, :num_tokens].transpose(1, 2)

    def _reserve(self, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return [num_blocks, block_size, Hkv, D] of the buffer, growing it if necessary."""
        num_elements = num_blocks * cache[0].numel()
        if self._buffer.dtype != cache.dtype or self._buffer.numel() < num_elements:
            # An ordinary tensor, so that it may be written inside and outside inference mode
            with torch.inference_mode(False):
                self._buffer = torch.empty(num_elements, dtype=cache.dtype)
        return self._buffer[:num_elements].view(num_blocks, *cache.shape[1:])


def _attend_decodes(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float,
) -> torch.Tensor:
    """Attend one query token per row. q: [N, H, D]; keys, values: [N, Hkv, s, D]; seq_lens: [N], 0 yields zeros.

    Masked slots hold other rows' values or stale ones. If these are not finite they count, as 0 * NaN; then attention
    is computed again without them. A device whose output the host should not wait for always computes it so.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_tokens = keys.shape[1:3]
    key_positions = torch.arange(num_tokens, device=q.device)
    is_padding = (seq_lens == 0)[:, None, None]
    seq_lens = seq_lens.clamp(min=1)[:, None]
    visible = key_positions < seq_lens
    if sliding_window is not None:
        visible &= key_positions >= seq_lens - sliding_window
    # Query heads that share a KV head use the query dimension, so that no key is copied per head
    grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attend = partial(_masked_attention, grouped, visible=visible[:, None, None, :], scale=scale, softcap=softcap)
    out = attend(keys, values) if q.device.type == "cpu" else None
    if out is None or not _is_finite(out):
        hidden = ~visible[:, None, :, None]
        out = attend(keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0))
    return out.reshape(num_rows, num_heads, head_dim).masked_fill(is_padding, 0.0)


def _is_finite(out: torch.Tensor) -> bool:
    return bool(out.isfinite().all())


def _attend_row(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float,
) -> torch.Tensor:
    """Attend the last n tokens of a row of s tokens. q: [n, H, D]; keys, values: [Hkv, s, D]; returns [n, H, D]."""
    num_tokens, num_heads, head_dim = q.shape
    if sliding_window is not None:  # no query sees the keys before
        first = max(0, keys.shape[1] - num_tokens - sliding_window + 1)
        keys, values = keys[:, first:], values[:, first:]
    num_kv_heads, seq_len, _ = keys.shape
    grouped = q.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    visible = None  # the whole row at once: SDPA's own causal mask, which needs no matrix
    if num_tokens != seq_len or sliding_window is not None or softcap > 0:
        key_positions = torch.arange(seq_len, device=q.device)
        query_positions = key_positions[seq_len - num_tokens :, None]
        visible = key_positions <= query_positions
        if sliding_window is not None:
            visible &= key_positions > query_positions - sliding_window
    # [Hkv, 1, s, D] broadcast over the group's heads, as a view
    keys = keys.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)
    values = values.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)
    out = _masked_attention(grouped, keys, values, visible, scale=scale, softcap=softcap)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """SDPA over [A, B, n, D] and [A, B, s, D] with a bool mask (None: causal); explicit softmax for capped logits."""
    if softcap > 0:
        assert visible is not None
        logits = (q.float() @ keys.float().transpose(-1, -2)) * scale
        logits = (softcap * torch.tanh(logits / softcap)).masked_fill(~visible, float("-inf"))
        return (logits.softmax(-1) @ values.float()).to(q.dtype)
    return functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=visible, is_causal=visible is None, scale=scale
    )
