"""Random steps of layers with states, shared by the unit tests, the interpreter's cases and the GPU tests.

What must not count is NaN: unused pages and pieces, states of rows that start at 0, padding rows and what is behind the
last row. A kernel that multiplies it by zero instead of leaving it out shows it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from kernels.states import StateMetadata, StateView, load_states, save_states

PADDING = -1


@dataclass(frozen=True)
class Row:
    """A row of a step: its tokens, and those before it (PADDING: a padding row)."""

    num_tokens: int
    start: int
    writes: bool = True


# One token and several, first rows and later ones, padding with tokens and without, drafts, rows around a chunk's end
RAGGED = [
    Row(1, 0), Row(1, 70), Row(3, 5), Row(1, PADDING), Row(70, 0), Row(4, 64, writes=False), Row(0, PADDING),
    Row(64, 64), Row(2, 1), Row(1, 9, writes=False), Row(5, PADDING), Row(65, 3), Row(1, 1), Row(130, 128),
]  # fmt: skip
ONE_TOKEN = [Row(1, 7), Row(1, 0), Row(1, PADDING), Row(1, 300), Row(1, 2, writes=False)]
SHORT = [Row(4, 7), Row(1, 0), Row(16, PADDING), Row(16, 300, writes=False), Row(0, PADDING), Row(2, 0), Row(3, 9)]
# As a CUDA graph of mixed steps has them: prompt rows first, then rows of one token
MIXED = [Row(70, 0), Row(5, 64), Row(1, 3), Row(1, PADDING), Row(1, 0), Row(1, 12)]


def make_metadata(rows: list[Row], *, device: str = "cpu", seed: int = 0, num_pages: int = 40) -> StateMetadata:
    """Metadata of the rows, each of another request; the pages of their states are all different and shuffled."""
    generator = torch.Generator().manual_seed(seed)
    requests = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]
    order = 1 + torch.randperm((len(rows) + 2) * num_pages, generator=generator)
    like = {"dtype": torch.int32, "device": device}
    lengths = torch.tensor([0] + [row.num_tokens for row in rows])
    is_all_decodes = all(row.num_tokens == 1 for row in rows)
    return StateMetadata(
        query_start_loc=lengths.cumsum(0).to(**like),
        seq_lens=torch.tensor([0 if row.start == PADDING else row.start + row.num_tokens for row in rows], **like),
        req_index=requests.to(device),
        pages=order.view(-1, num_pages).to(**like),
        writes=None if all(row.writes for row in rows) else torch.tensor([row.writes for row in rows]).to(**like),
        max_query_len=max(row.num_tokens for row in rows),
        num_decodes=len(rows) if is_all_decodes else None,
        max_prefills=None,
    )


def make_view(
    metadata: StateMetadata,
    num_rows: int,
    row_size: int,
    *,
    rows_per_piece: int = 5,
    rest: int = 3,
    first_piece: int = 4,
    num_lanes: int = 3,
    seed: int = 0,
) -> StateView:
    """A pool of NaN with the random states of all rows that do not start at 0. A piece's end holds `rest` numbers."""
    device = metadata.pages.device
    piece = rows_per_piece * row_size + rest
    pool = torch.full((num_lanes, 1 + metadata.pages.numel(), piece), torch.nan, device=device)
    view = StateView(pool, first_piece, num_rows, row_size)
    assert first_piece + view.num_pieces <= num_lanes * metadata.pages.shape[1], "too few pages for this state"
    generator = torch.Generator(device).manual_seed(seed + 1)
    states = torch.randn(len(metadata.seq_lens), num_rows, row_size, generator=generator, device=device)
    has_state = metadata.seq_lens > metadata.query_start_loc.diff()
    save_states(view, dataclasses.replace(metadata, seq_lens=has_state.int(), writes=None), states)
    return view


def clone(view: StateView) -> StateView:
    """The same view of another pool with the same numbers."""
    return dataclasses.replace(view, pool=view.pool.clone())


def states_after(view: StateView, metadata: StateMetadata) -> torch.Tensor:
    """What a next row of each request would read; zeros for padding rows, and for first rows that do not write."""
    lengths = metadata.query_start_loc.diff()
    has_state = metadata.seq_lens > 0
    if metadata.writes is not None:
        has_state &= (metadata.writes != 0) | (metadata.seq_lens > lengths)
    ends = torch.where(has_state, metadata.seq_lens + lengths, 0).int()
    return load_states(view, dataclasses.replace(metadata, seq_lens=ends))


def assert_only_states_changed(view: StateView, before: StateView, metadata: StateMetadata) -> None:
    """No number of the pool differs but in states of rows that may write; a piece's rest may be overwritten."""
    writes = metadata.seq_lens > 0
    if metadata.writes is not None:
        writes &= metadata.writes != 0
    marks = dataclasses.replace(view, pool=torch.zeros_like(view.pool))
    size = view.rows_per_piece * view.row_size
    ones = torch.ones(len(writes), view.num_rows, view.row_size, device=view.pool.device)
    save_states(marks, dataclasses.replace(metadata, seq_lens=writes.int(), writes=None), ones)
    is_kept = marks.pool[..., :size] == 0
    kept, expected = view.pool[..., :size][is_kept], before.pool[..., :size][is_kept]
    # The last piece's unused rows are written as zeros by save_states and not at all by kernels
    same = (kept == expected) | (kept.isnan() & expected.isnan()) | (kept == 0)
    assert bool(same.all())


def make_conv(
    metadata: StateMetadata, channels: int, width: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a slice of wider rows, weight and bias; NaN where no output may come from."""
    device = metadata.pages.device
    generator = torch.Generator(device).manual_seed(seed + 2)
    like = {"generator": generator, "device": device}
    num_tokens = int(metadata.query_start_loc[-1])
    x = torch.randn(num_tokens, channels + 8, **like)
    x[~_is_token(metadata)] = torch.nan
    return x.to(dtype)[:, 4:-4], torch.randn(channels, width, **like).to(dtype), torch.randn(channels, **like).to(dtype)


def make_delta(
    metadata: StateMetadata,
    *,
    key_heads: int,
    value_heads: int,
    d_k: int,
    d_v: int,
    by_dimension: bool = False,
    strongest: float = 2.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, slices of one tensor, g and beta; NaN in padding. Gates from 0 to -strongest, most of them weak."""
    device = metadata.pages.device
    generator = torch.Generator(device).manual_seed(seed + 3)
    like = {"generator": generator, "device": device}
    num_tokens, sizes = int(metadata.query_start_loc[-1]), [key_heads * d_k, key_heads * d_k, value_heads * d_v]
    is_padding = ~_is_token(metadata)
    qkv = torch.randn(num_tokens, sum(sizes), **like)
    g = -strongest * torch.rand(num_tokens, value_heads, *[d_k] * by_dimension, **like).pow(4)
    beta = torch.rand(num_tokens, value_heads, **like)
    for x in (qkv, g, beta):
        x[is_padding] = torch.nan
    q, k, v = qkv.to(dtype).split(sizes, dim=1)
    return q.unflatten(1, (-1, d_k)), k.unflatten(1, (-1, d_k)), v.unflatten(1, (-1, d_v)), g, beta


def _is_token(metadata: StateMetadata) -> torch.Tensor:
    lengths = metadata.query_start_loc.diff()
    return (metadata.seq_lens > 0).repeat_interleave(lengths.long())
