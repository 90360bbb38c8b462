"""Problem: an attention problem on any device, with equal rows over a shuffled paged cache, and its float64 check.

Inputs are random and new each time. `caches` has enough layers that successive calls do not find them in L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernel_timing import TensorOptions
from kernels.attention.base import AttentionMetadata
from kernels.elementwise.reference import to_fp8

_NUM_CHECKED = 64  # queries at each end of a row
_TABLE_PADDING = 16  # entries: what kernels read at once


@dataclass(frozen=True)
class Heads:
    """The attention shape and dtype of one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Problem:
    """Rows of query_len queries at the end of seq_len tokens."""

    heads: Heads
    query_len: int
    seq_len: int
    # [rows * query_len, num_heads, head_dim]
    q: torch.Tensor
    # one (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim]
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    # [rows, blocks of a row, padded]
    block_table: torch.Tensor
    # [rows + 1]
    query_start_loc: torch.Tensor
    # [rows]
    seq_lens: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.seq_lens.shape[0]

    def metadata(self) -> AttentionMetadata:
        """Return the problem as AttentionMetadata; its slots are unused, since every key is written."""
        return AttentionMetadata(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=torch.zeros(self.q.shape[0], dtype=torch.int64, device=self.q.device),
            max_query_len=self.query_len,
            max_seq_len=self.seq_len,
            num_decodes=self.num_rows if self.query_len == 1 else 0,
        )

    def gather(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row's keys and values, each [seq_len, num_kv_heads, head_dim]."""
        block_size = self.caches[layer][0].shape[1]
        blocks = self.block_table[row, : -(-self.seq_len // block_size)].long()
        keys, values = (cache[blocks].flatten(0, 1)[: self.seq_len] for cache in self.caches[layer])
        return keys, values


def make_problem(
    heads: Heads,
    *,
    num_rows: int,
    query_len: int,
    seq_len: int,
    block_size: int,
    num_layers: int,
    is_fp8: bool = False,
) -> Problem:
    """Draw the inputs. is_fp8: dtype of the caches, with scales of 1. Raises torch.OutOfMemoryError."""
    num_blocks = -(-seq_len // block_size)
    shape = (num_rows * num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
    like: TensorOptions = {"dtype": heads.dtype, "device": heads.device}
    indices: TensorOptions = {"dtype": torch.int32, "device": heads.device}
    table = torch.zeros(num_rows, -(-num_blocks // _TABLE_PADDING) * _TABLE_PADDING, **indices)
    table[:, :num_blocks] = torch.randperm(num_rows * num_blocks, **indices).view(num_rows, num_blocks)

    def draw() -> torch.Tensor:
        cache = torch.randn(shape, **like)
        return to_fp8(cache, 1.0) if is_fp8 else cache

    return Problem(
        heads=heads,
        query_len=query_len,
        seq_len=seq_len,
        q=torch.randn(num_rows * query_len, heads.num_heads, heads.head_dim, **like),
        caches=[(draw(), draw()) for _ in range(num_layers)],
        block_table=table,
        query_start_loc=torch.arange(0, (num_rows + 1) * query_len, query_len, **indices),
        seq_lens=torch.full((num_rows,), seq_len, **indices),
    )


def relative_error(
    problem: Problem, out: torch.Tensor, *, sliding_window: int | None = None, sinks: torch.Tensor | None = None
) -> float:
    """Return the worst row's ‖out − float64‖ / ‖float64‖ in the last layer; inf if out is not finite.

    Checks the first, middle and last row, queries at both ends. out: [rows * query_len, num_heads, head_dim].
    """
    if not bool(out.isfinite().all()):
        return float("inf")
    rows = {0, problem.num_rows // 2, problem.num_rows - 1}
    return max(_row_error(problem, out, row, sliding_window, sinks) for row in rows)


def _row_error(
    problem: Problem, out: torch.Tensor, row: int, sliding_window: int | None, sinks: torch.Tensor | None
) -> float:
    keys, values = (t.double() for t in problem.gather(-1, row))
    queries = _ends(problem.query_len)
    tokens = torch.tensor(queries, device=out.device) + row * problem.query_len
    group = problem.heads.num_heads // problem.heads.num_kv_heads
    q = problem.q[tokens].double().unflatten(1, (-1, group))
    logits = torch.einsum("qhgd,khd->hgqk", q, keys) * problem.heads.scale
    positions = torch.tensor(queries, device=out.device) + problem.seq_len - problem.query_len
    key_positions = torch.arange(problem.seq_len, device=out.device)
    logits.masked_fill_(key_positions > positions[:, None], float("-inf"))
    if sliding_window is not None:
        logits.masked_fill_(key_positions <= positions[:, None] - sliding_window, float("-inf"))
    if sinks is not None:  # one more logit a head, whose weight is dropped
        extra = sinks.double().view(*logits.shape[:2], 1, 1).expand(-1, -1, len(queries), 1)
        logits = torch.cat((logits, extra), -1)
    weights = logits.softmax(-1)[..., : problem.seq_len]
    expected = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
    return float((out[tokens].double() - expected).norm() / expected.norm())


def _ends(query_len: int) -> Sequence[int]:
    return sorted({*range(min(_NUM_CHECKED, query_len)), *range(max(query_len - _NUM_CHECKED, 0), query_len)})
