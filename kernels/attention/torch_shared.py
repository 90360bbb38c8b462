"""Attention of rows that begin with the same blocks, in torch: the specification of grouped decode attention.

The keys of a group's common blocks are read once for all its rows; each row then attends over the keys behind them. The
two softmaxes are merged by the logarithms of their denominators, as in cascade attention (Ye et al. 2024,
flashinfer.ai/2024/02/02/cascade-inference.html). A sink counts in the second one. Sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.attention.base import AttentionMetadata, SharedRows

# Gathers the keys and values of blocks [n]: [num_kv_heads, tokens, head_dim] each, with their scales
ReadBlocks = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def groups_of(shared: SharedRows, seq_lens: torch.Tensor, rows: range) -> list[tuple[list[int], int]]:
    """Return the groups of at least two of these rows of one token, and their shared tokens. Waits for the device."""
    found: dict[int, tuple[list[int], int]] = {}
    shares = shared.shares[shared.req_index.long()].tolist()
    lengths = seq_lens.tolist()
    for row in rows:
        number, tokens = shares[row]
        if number and lengths[row] > tokens:
            found.setdefault(number, ([], tokens))[0].append(row)
    return [group for group in found.values() if len(group[0]) > 1]


def attend_by_groups(
    q: torch.Tensor,
    metadata: AttentionMetadata,
    rows: range,
    read: ReadBlocks,
    *,
    block_size: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend `rows` of one token each, q: [len(rows), num_heads, head_dim]; returns [len(rows), num_heads, any]."""
    assert metadata.shared is not None
    lengths = metadata.seq_lens.tolist()
    begun: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # by row: of its shared tokens, whose number is third
    for members, tokens in groups_of(metadata.shared, metadata.seq_lens, rows):
        keys, values = read(metadata.block_table[members[0], : tokens // block_size])
        out, lse = _attend(q[[row - rows.start for row in members]], keys, values, scale=scale, softcap=softcap)
        begun |= {row: (out[place], lse[place], tokens) for place, row in enumerate(members)}
    outputs = []
    for row, query in zip(rows, q, strict=True):
        part = begun.get(row)
        first = 0 if part is None else part[2] // block_size
        keys, values = read(metadata.block_table[row, first : -(-lengths[row] // block_size)])
        num_own = lengths[row] - first * block_size
        if not num_own:  # padding
            outputs.append(values.new_zeros(q.shape[1], values.shape[-1], dtype=torch.float32))
            continue
        out, lse = _attend(
            query[None], keys[:, :num_own], values[:, :num_own], scale=scale, softcap=softcap, sinks=sinks
        )
        outputs.append(out[0] if part is None else _merge(out[0], lse[0], part[0], part[1]))
    return torch.stack(outputs).to(q.dtype)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend queries [n, H, D] over all of keys [Hkv, s, D]; returns [n, H, Dv] and the log of denominators [n, H]."""
    grouped = q.float().unflatten(1, (keys.shape[0], -1))
    logits = torch.einsum("nkgd,ksd->nkgs", grouped, keys.float()) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if sinks is not None:  # one more logit a head, whose weight is dropped
        sinks = sinks.view(1, keys.shape[0], -1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sinks), -1)
    weights = logits.softmax(-1)[..., : keys.shape[1]]
    out = torch.einsum("nkgs,ksd->nkgd", weights, values.float())
    return out.flatten(1, 2), logits.logsumexp(-1).flatten(1, 2)


def _merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Merge the attention of one query over two sets of keys: [H, Dv] and [H] each."""
    share = torch.sigmoid(lse - other_lse)[:, None]  # exp(lse) / (exp(lse) + exp(other_lse))
    return out * share + other * (1 - share)
