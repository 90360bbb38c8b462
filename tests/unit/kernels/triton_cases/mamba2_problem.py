"""Random ragged batches of Mamba-2 rows with states scattered in a pool of NaN, for unit, interpreter and GPU tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.mamba2 import reference
from kernels.states import StateMetadata, StateView, load_states, save_states

PADDING = -1  # the start of a padding row


@dataclass(frozen=True)
class Problem:
    """The arguments of mamba2."""

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    view: StateView
    metadata: StateMetadata

    def run(self, op: Callable[..., torch.Tensor], **options: object) -> tuple[torch.Tensor, StateView]:
        """Call op on a copy of the pool; return y and the view after the step."""
        view = dataclasses.replace(self.view, pool=self.view.pool.clone())
        y = op(self.x, self.b, self.c, self.dt, self.a, self.d, view, self.metadata, **options)
        return y, view

    def with_bounds(self, *, num_decodes: int | None, max_prefills: int | None) -> Problem:
        """Return the problem with other bounds on its rows."""
        metadata = dataclasses.replace(self.metadata, num_decodes=num_decodes, max_prefills=max_prefills)
        return dataclasses.replace(self, metadata=metadata)


def make_problem(
    rows: Sequence[tuple[int, int]],
    *,
    num_heads: int = 4,
    head_dim: int = 8,
    state_size: int = 16,
    num_groups: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    writes: Sequence[int] | None = None,
    decay: float = 1.0,
    num_lanes: int = 3,
    first_piece: int = 2,
    rest: int = 5,
) -> Problem:
    """rows: (tokens before the row, tokens of the row); (PADDING, n) is a padding row. decay: factor of a * dt.

    What no row may use is NaN: pages of others, what is left of pieces, states of rows that start at 0, padding tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    lens = torch.tensor([num_tokens for _, num_tokens in rows])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    seq_lens = torch.tensor([0 if before == PADDING else before + num_tokens for before, num_tokens in rows])
    view, pages = _scattered(
        len(rows), num_heads * head_dim, state_size, num_lanes, first_piece, rest, generator=generator
    )
    req_index = torch.randperm(len(rows), generator=generator)
    metadata = StateMetadata(
        query_start_loc=starts.int(),
        seq_lens=seq_lens.int(),
        req_index=req_index,
        pages=pages,
        writes=None if writes is None else torch.tensor(writes, dtype=torch.int32),
        max_query_len=int(lens.max()),
        num_decodes=None,
    )
    before = torch.randn(len(rows), view.num_rows, state_size, generator=generator)
    begun = torch.tensor([start for start, _ in rows], dtype=torch.int32)
    save_states(view, dataclasses.replace(metadata, seq_lens=begun, writes=None), before)
    num_tokens, width = int(starts[-1]), num_heads * head_dim
    channels = torch.randn(num_tokens, width + 2 * num_groups * state_size + 3, generator=generator).to(dtype)
    dt = torch.rand(num_tokens, num_heads, generator=generator) * 2
    for row, (before_row, _) in enumerate(rows):
        if before_row == PADDING:
            channels[starts[row] : starts[row + 1]] = dt[starts[row] : starts[row + 1]] = torch.nan
    a = -torch.rand(num_heads, generator=generator) * decay
    d = torch.randn(num_heads, generator=generator)
    channels = channels.to(device)
    x, b, c, _ = channels.split([width, num_groups * state_size, num_groups * state_size, 3], dim=1)
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in vars(metadata).items()
    }
    return Problem(
        x=x.unflatten(1, (num_heads, head_dim)),
        b=b.unflatten(1, (num_groups, state_size)),
        c=c.unflatten(1, (num_groups, state_size)),
        dt=dt.to(device),
        a=a.to(device),
        d=d.to(device),
        view=dataclasses.replace(view, pool=view.pool.to(device)),
        metadata=StateMetadata(**moved),
    )


def states_of(view: StateView, metadata: StateMetadata) -> torch.Tensor:
    """Return what the pool holds of each row's request, [R, num_rows, row_size], whether or not the row began at 0."""
    return load_states(view, dataclasses.replace(metadata, seq_lens=torch.full_like(metadata.seq_lens, 1 << 30)))


def error_of(problem: Problem, op: Callable[..., torch.Tensor], **options: object) -> float:
    """Return the larger error of outputs and states against the specification, each in its norm.

    Asserts that NaN is where the specification has it: in what the op had no reason to write.
    """
    (y, view), (expected_y, expected_view) = problem.run(op, **options), problem.run(reference.mamba2)
    assert (y.dtype, y.shape) == (expected_y.dtype, expected_y.shape)
    states, expected = states_of(view, problem.metadata), states_of(expected_view, problem.metadata)
    assert torch.equal(states.isnan(), expected.isnan())
    size = view.rows_per_piece * view.row_size
    assert view.pool[:, :, size:].isnan().all()
    untouched = expected_view.pool[:, :, :size].isnan().all(-1)
    assert view.pool[:, :, :size][untouched].isnan().all()
    return max(_relative(y, expected_y), _relative(states.nan_to_num(), expected.nan_to_num()))


def _relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    return float(error)


def _scattered(
    num_requests: int,
    num_rows: int,
    row_size: int,
    num_lanes: int,
    first_piece: int,
    rest: int,
    *,
    generator: torch.Generator,
) -> tuple[StateView, torch.Tensor]:
    """Return a view into a pool of NaN, and [requests, pages] random pages for it; pieces have 3 rows and a rest."""
    piece = 3 * row_size + rest
    num_pieces = first_piece + -(-num_rows // 3) + 1
    pages_each = -(-num_pieces // num_lanes)
    num_pages = 1 + num_requests * pages_each + 2
    pool = torch.full((num_lanes, num_pages, piece), torch.nan)
    order = torch.randperm(num_pages - 1, generator=generator)[: num_requests * pages_each] + 1
    view = StateView(pool, first_piece=first_piece, num_rows=num_rows, row_size=row_size)
    return view, order.view(num_requests, pages_each).int()
