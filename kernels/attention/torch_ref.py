"""Paged attention in plain torch: the oracle of every other backend, and what CPU and MPS run.

Decode rows go in one batched gather and one SDPA call, so their cost holds no Python per row. The other rows go one by
one: their lengths are read on the host, which on a GPU is a sync; a GPU that serves uses another backend.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.attention.base import AttentionMetadata, AttentionSpec


class TorchAttention:
    """AttentionBackend over gathered pages. Stateless."""

    name = "torch"
    block_size_multiple = 1

    @classmethod
    def refuse(cls, spec: AttentionSpec) -> str | None:
        """Refuse only head counts that no grouped-query attention has."""
        if spec.num_heads % spec.num_kv_heads != 0:
            return f"num_heads {spec.num_heads} is not a multiple of num_kv_heads {spec.num_kv_heads}"
        return None

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
    ) -> torch.Tensor:
        """Attend each row over its own tokens; see AttentionBackend.forward for shapes.

        A padding row (seq_len 0) yields the value of its first slot: finite wherever the cache is finite.
        """
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        num_decodes = metadata.num_decodes
        if num_decodes > 0:
            out[:num_decodes] = _attend_decodes(
                q[:num_decodes], k_cache, v_cache, metadata, scale=scale, sliding_window=sliding_window, softcap=softcap
            )
        if metadata.seq_lens.shape[0] == num_decodes:
            return out
        starts = metadata.query_start_loc[num_decodes:].tolist()
        seq_lens = metadata.seq_lens[num_decodes:].tolist()
        for row, (start, end, seq_len) in enumerate(zip(starts[:-1], starts[1:], seq_lens, strict=True), num_decodes):
            out[start:end] = _attend_row(
                q[start:end],
                _gather(k_cache, metadata.block_table[row : row + 1], max(seq_len, 1))[0],
                _gather(v_cache, metadata.block_table[row : row + 1], max(seq_len, 1))[0],
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
            )
        return out


def _attend_decodes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float,
) -> torch.Tensor:
    """One query token per row. q: [N, H, D], the metadata's first N rows; returns [N, H, D]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    keys = _gather(k_cache, metadata.block_table[:num_rows], metadata.max_seq_len)
    values = _gather(v_cache, metadata.block_table[:num_rows], metadata.max_seq_len)
    lengths = metadata.seq_lens[:num_rows].clamp(min=1)[:, None]
    key_positions = torch.arange(keys.shape[2], device=q.device)
    visible = key_positions < lengths
    if sliding_window is not None:
        visible &= key_positions >= lengths - sliding_window
    # The query heads that share a KV head stand in the query dimension: no key is copied per head
    grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = _masked_attention(grouped, keys, values, visible[:, None, None, :], scale=scale, softcap=softcap)
    return out.reshape(num_rows, num_heads, head_dim)


def _attend_row(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float,
) -> torch.Tensor:
    """The last n tokens of one row of s tokens. q: [n, H, D]; keys, values: [Hkv, s, D]; returns [n, H, D]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, seq_len, _ = keys.shape
    grouped = q.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    visible = None  # the whole row at once: SDPA's own causal mask, for which it builds no matrix
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
    """SDPA over [A, B, n, D] and [A, B, s, D] with a bool mask (None: causal), or by hand where logits are capped."""
    if softcap > 0:
        assert visible is not None
        logits = (q.float() @ keys.float().transpose(-1, -2)) * scale
        logits = (softcap * torch.tanh(logits / softcap)).masked_fill(~visible, float("-inf"))
        return (logits.softmax(-1) @ values.float()).to(q.dtype)
    return functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=visible, is_causal=visible is None, scale=scale
    )


def _gather(cache: torch.Tensor, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first num_tokens tokens of each row: [N, max_blocks] over the pool → [N, Hkv, num_tokens, D] (a view)."""
    num_rows = block_table.shape[0]
    _, block_size, num_kv_heads, head_dim = cache.shape
    num_blocks = min(-(-num_tokens // block_size), block_table.shape[1])
    pages = cache.index_select(0, block_table[:, :num_blocks].flatten())
    tokens = pages.view(num_rows, num_blocks * block_size, num_kv_heads, head_dim)
    return tokens[:, :num_tokens].transpose(1, 2)
