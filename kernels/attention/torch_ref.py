"""TorchAttention: paged attention in plain torch, the oracle of every other backend, and the backend for CPU and MPS.

Decode rows are computed by one gather and one SDPA call, or by kernels/native from the pool, without Python per row.
The other rows are computed one by one, or by kernels/native where its products are the fastest on this CPU. Else their
lengths are read on the host, which syncs a GPU, so GPUs use others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from kernels.attention.base import AttentionMetadata, AttentionSpec
from kernels.attention.torch_pages import Gathered, Rule, seen_blocks
from kernels.attention.torch_shared import attend_by_groups
from kernels.elementwise.reference import UNSCALED, KVScales
from kernels.native.ops import attend, attend_prompts, takes_attention, takes_prompts

_LARGE_TOKEN = 256  # numbers in a token's keys from which one row's attention takes longer than its call


class TorchAttention:
    """AttentionBackend over gathered pages. Its state: buffers for gathered pages, and the last step's rows."""

    name = "torch"
    block_size_multiple = 1
    groups_rows = True
    is_graph_safe = False  # the gather is as wide as the bound, so a graph would always compute the longest length

    def __init__(self) -> None:
        self._keys = Gathered()
        self._values = Gathered()
        self._step: AttentionMetadata | None = None
        self._row_blocks: dict[tuple[int | None, int | None, int], _RowBlocks] = {}

    @classmethod
    def refuse(cls, spec: AttentionSpec) -> str | None:
        """Refuse only head counts that are invalid for grouped-query attention."""
        is_valid = spec.num_heads % spec.num_kv_heads == 0
        return None if is_valid else f"num_heads {spec.num_heads} is not a multiple of num_kv_heads {spec.num_kv_heads}"

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
        chunk: int | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        """Attend each row over its own tokens; see AttentionBackend.forward for shapes.

        A padding row (seq_len 0) yields zeros. FP8 is exact in every dtype of q, so a layer's scales are applied where
        they touch the fewest numbers: in the logits' scale, and in the output. Scales of heads and of tokens are
        applied to the gathered keys and values.
        """
        k_scale, k_scales = _constant_and_others(kv_scales.k)
        v_scale, v_scales = _constant_and_others(kv_scales.v)
        rule = Rule(scale * k_scale, sliding_window, chunk, softcap, sinks)
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        decodes, others = _split_rows(metadata)
        is_native = q.dtype == torch.bfloat16 and takes_prompts(q, k_cache, v_cache)

        def attend_natively(rows: range) -> None:
            attend_prompts(
                q, k_cache, v_cache, out, metadata.query_start_loc[rows.start : rows.stop + 1],
                metadata.seq_lens[rows.start : rows.stop], metadata.block_table[rows.start : rows.stop], sinks,
                scale=rule.scale, sliding_window=sliding_window, chunk=chunk, softcap=softcap,
                max_seq_len=metadata.max_seq_len,
            )  # fmt: skip

        if len(decodes) and metadata.shared is not None and rule.reach is None:
            first = 0 if decodes.start == 0 else q.shape[0] - len(decodes)

            def read(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                num_tokens = len(blocks) * k_cache.shape[1]
                keys = self._keys.gather(k_cache, blocks[None], num_tokens, q.dtype, k_scales)
                return keys[0], self._values.gather(v_cache, blocks[None], num_tokens, q.dtype, v_scales)[0]

            out[first : first + len(decodes)] = attend_by_groups(
                q[first : first + len(decodes)], metadata, decodes, read,
                block_size=k_cache.shape[1], scale=rule.scale, softcap=softcap, sinks=sinks,
            )  # fmt: skip
        elif len(decodes) and rule.is_plain and q.dtype == torch.bfloat16 and takes_attention(q, k_cache, v_cache):
            rows, first = slice(decodes.start, decodes.stop), q.shape[0] - len(decodes) if decodes.start else 0
            attend(
                q[first:], k_cache, v_cache, out[first:], metadata.seq_lens[rows], metadata.block_table[rows],
                scale=rule.scale, sliding_window=sliding_window, chunk=chunk, max_seq_len=metadata.max_seq_len,
            )  # fmt: skip
        elif len(decodes) and is_native:
            attend_natively(decodes)
        elif len(decodes) and _takes_rows_alone(q, k_cache, rule):
            first = 0 if decodes.start == 0 else q.shape[0] - len(decodes)
            blocks = self._read_rows(metadata, decodes, rule, k_cache.shape[1])
            self._attend_alone(q[first:], out[first:], (k_cache, k_scales), (v_cache, v_scales), blocks, rule)
        elif len(decodes):
            first = 0 if decodes.start == 0 else q.shape[0] - len(decodes)  # of their tokens
            rows, tokens = slice(decodes.start, decodes.stop), slice(first, first + len(decodes))
            seq_lens = metadata.seq_lens[rows]
            tables, firsts, num_tokens = seen_blocks(
                metadata.block_table[rows], seq_lens, rule, block_size=k_cache.shape[1], bound=metadata.max_seq_len
            )
            keys = self._keys.gather(k_cache, tables, num_tokens, q.dtype, k_scales)
            values = self._values.gather(v_cache, tables, num_tokens, q.dtype, v_scales)
            out[tokens] = _attend_decodes(q[tokens], keys, values, seq_lens, firsts, rule)
        if not len(others):
            return _scaled(out, v_scale)
        if is_native:
            attend_natively(others)
            return _scaled(out, v_scale)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for row in others:
            start, end, length = starts[row], starts[row + 1], lengths[row]
            if length == 0:
                out[start:end] = 0
                continue
            oldest = rule.oldest(length - (end - start))
            first_block, skipped = divmod(oldest, k_cache.shape[1])
            table = metadata.block_table[row : row + 1, first_block:]
            num_tokens = length - oldest + skipped
            keys = self._keys.gather(k_cache, table, num_tokens, q.dtype, k_scales)[0, :, skipped:]
            values = self._values.gather(v_cache, table, num_tokens, q.dtype, v_scales)[0, :, skipped:]
            out[start:end] = _attend_row(q[start:end], keys, values, rule, seq_len=length)
        return _scaled(out, v_scale)

    def _read_rows(self, metadata: AttentionMetadata, rows: range, rule: Rule, block_size: int) -> _RowBlocks:
        """Return the blocks that decode rows read; computed once a step for layers that see equally far."""
        if self._step is not metadata:
            self._step, self._row_blocks = metadata, {}
        key = (rule.sliding_window, rule.chunk, block_size)
        if key not in self._row_blocks:
            self._row_blocks[key] = _RowBlocks.read(metadata, rows, rule, block_size)
        return self._row_blocks[key]

    def _attend_alone(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        k: tuple[torch.Tensor, torch.Tensor | None],
        v: tuple[torch.Tensor, torch.Tensor | None],
        rows: _RowBlocks,
        rule: Rule,
    ) -> None:
        """Write the attention of one-token rows, the first of q and out, each over its own tokens.

        k, v: the pool's, with the scales of heads, or of tokens and heads.
        """
        (k_cache, k_scales), (v_cache, v_scales) = k, v
        table, block_size = rows.block_ids[None], k_cache.shape[1]
        num_tokens = table.shape[1] * block_size
        keys = self._keys.gather(k_cache, table, num_tokens, q.dtype, k_scales)
        values = self._values.gather(v_cache, table, num_tokens, q.dtype, v_scales)
        for row, (first_block, skipped, length) in enumerate(rows.spans):
            if length == 0:
                out[row] = 0
                continue
            start = first_block * block_size + skipped
            seen = slice(start, start + length)
            out[row : row + 1] = _attend_one(q[row : row + 1], keys[:, :, seen], values[:, :, seen], rule)


@dataclass(frozen=True)
class _RowBlocks:
    """The blocks that a step's one-token rows read, side by side."""

    # [n] int32
    block_ids: torch.Tensor
    # of each row: its first place in block_ids, the tokens there that it does not see, and those it sees, 0 for padding
    spans: list[tuple[int, int, int]]

    @classmethod
    def read(cls, metadata: AttentionMetadata, rows: range, rule: Rule, block_size: int) -> _RowBlocks:
        """Read rows' lengths and tables, on the CPU."""
        tables, spans, num_blocks = [], [], 0
        for row, length in zip(rows, metadata.seq_lens[rows.start : rows.stop].tolist(), strict=True):
            oldest = rule.oldest(length - 1) if length else 0
            first, skipped = divmod(oldest, block_size)
            table = metadata.block_table[row, first : -(-length // block_size)]
            tables.append(table)
            spans.append((num_blocks, skipped, length - oldest))
            num_blocks += table.shape[0]
        return cls(torch.cat(tables), spans)


def _takes_rows_alone(q: torch.Tensor, k_cache: torch.Tensor, rule: Rule) -> bool:
    """Return True if decode rows, too, are computed one by one: each over its own length, without a mask.

    For bf16 on the CPU, whose models have heads large enough that a row takes longer than its call. Then no row's time
    depends on the longest one's, and no masked slot can hold a number that counts.
    """
    is_small = k_cache.shape[2] * k_cache.shape[3] < _LARGE_TOKEN
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and not is_small and rule.is_plain


def _constant_and_others(scale: float | torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """Return the part of a scale that is constant for the layer, and the scales of heads, or of tokens and heads."""
    return (1.0, scale) if isinstance(scale, torch.Tensor) else (scale, None)


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


def _attend_decodes(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Attend one query token per row. q: [N, H, D]; keys, values: [N, Hkv, s, D]; seq_lens: [N], 0 yields zeros.

    starts: [N] the position of each row's first key. Masked slots hold other rows' values or stale ones. If these are
    not finite they count, as 0 * NaN; then attention is computed again without them. A device whose output the host
    should not wait for always computes it so.
    """
    num_rows, num_heads, _ = q.shape
    num_kv_heads, num_tokens = keys.shape[1:3]
    key_positions = starts[:, None] + torch.arange(num_tokens, device=q.device)
    is_padding = (seq_lens == 0)[:, None, None]
    last = (seq_lens.clamp(min=1) - 1)[:, None]
    visible = (key_positions <= last) & (key_positions >= rule.oldest_of(last))
    # Query heads that share a KV head use the query dimension, so that no key is copied per head
    grouped = q.unflatten(1, (num_kv_heads, -1))
    sinks = None if rule.sinks is None else rule.sinks.view(num_kv_heads, -1, 1)
    attend = partial(_masked_attention, grouped, visible=visible[:, None, None, :], rule=rule, sinks=sinks)
    out = attend(keys, values) if q.device.type == "cpu" else None
    if out is None or not _is_finite(out):
        hidden = ~visible[:, None, :, None]
        out = attend(keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0))
    return out.reshape(num_rows, num_heads, -1).masked_fill(is_padding, 0.0)


def _is_finite(out: torch.Tensor) -> bool:
    return bool(out.isfinite().all())


def _attend_row(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: Rule, *, seq_len: int) -> torch.Tensor:
    """Attend the last n of a row's seq_len tokens over its last s tokens, which are all that the queries see.

    q: [n, H, D]; keys, values: [Hkv, s, D]; returns [n, H, Dv].
    """
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    if num_tokens == 1 and rule.is_plain:  # it sees every key, and query heads use the dimension of queries
        return _attend_one(q, keys[None], values[None], rule)
    grouped = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    visible = None  # the whole row at once: SDPA's own causal mask, which needs no matrix
    if num_tokens != seq_len or rule.reach is not None or not rule.is_plain:
        key_positions = torch.arange(seq_len - num_keys, seq_len, device=q.device)
        query_positions = key_positions[num_keys - num_tokens :, None]
        visible = (key_positions <= query_positions) & (key_positions >= rule.oldest_of(query_positions))
    # [Hkv, 1, s, D] broadcast over the group's heads, as a view
    keys = keys.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)
    values = values.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)
    sinks = None if rule.sinks is None else rule.sinks.view(num_kv_heads, -1, 1, 1)
    out = _masked_attention(grouped, keys, values, visible=visible, rule=rule, sinks=sinks)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1)


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Attend one query over all keys given. q: [1, H, D]; keys, values: [1, Hkv, s, D]; returns [1, H, Dv]."""
    grouped = q.unflatten(1, (keys.shape[1], -1))
    return functional.scaled_dot_product_attention(grouped, keys, values, scale=rule.scale).flatten(1, 2)


def _masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    visible: torch.Tensor | None,
    rule: Rule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """SDPA over [A, B, n, D] and [A, B, s, D] with a bool mask (None: causal); explicit softmax for caps and sinks.

    sinks: rule's, in a shape that broadcasts to [A, B, n, 1].
    """
    if rule.softcap == 0.0 and sinks is None:
        return functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, is_causal=visible is None, scale=rule.scale
        )
    assert visible is not None
    logits = (q.float() @ keys.float().transpose(-1, -2)) * rule.scale
    if rule.softcap > 0:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:  # one more logit a head, whose weight is dropped
        logits = torch.cat((logits, sinks.expand(*logits.shape[:-1], 1)), -1)
    weights = logits.softmax(-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(q.dtype)
