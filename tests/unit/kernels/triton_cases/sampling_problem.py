"""Sampling problems for the Triton sampler's tests, on any device: rows of any parameters, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.sampling.reference import NO_TOKEN, Truncation, gumbel_noise, sample, truncate


class Parameters(NamedTuple):
    """One row's."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass
class Problem:
    """S rows of logits whose parameters lie scattered in the state, by req_index."""

    rows: list[Parameters]
    logits: torch.Tensor
    req_index: torch.Tensor
    positions: torch.Tensor
    state: object  # triton_sampling.SamplingState


def make_problem(rows, size, *, spread=3.0, dtype=torch.float32, device="cpu", seed=0):
    """Random logits of that spread, the rows of a wider tensor; random seeds and positions."""
    from kernels.sampling.reference import SamplingState

    random = torch.Generator(device).manual_seed(seed)
    num_rows, num_requests = len(rows), len(rows) + 3
    wide = torch.randn(num_rows, size + 48, device=device, generator=random)
    req_index = torch.randperm(num_requests, device=device, generator=random)[:num_rows]
    floats = torch.tensor([(r.temperature, r.top_p, r.min_p) for r in rows], device=device).T
    temperature, top_p, min_p = torch.full((3, num_requests), 0.5, device=device)
    temperature[req_index], top_p[req_index], min_p[req_index] = floats
    top_k = torch.full((num_requests,), 2, device=device)
    top_k[req_index] = torch.tensor([r.top_k for r in rows], device=device)
    seeds = torch.randint(-(2**62), 2**62, (num_requests,), device=device, generator=random)
    positions = torch.randint(0, 100_000, (num_rows,), device=device, generator=random)
    last_token = torch.full((num_requests,), -1, device=device)
    state = SamplingState(temperature, top_p, min_p, top_k, seeds, last_token)
    return Problem(rows, (wide * spread).to(dtype)[:, :size], req_index, positions, state)


def make_scratch(problem):
    """Scratch whose numbers a sampler must write before it reads them."""
    from kernels.sampling.triton_draw import SamplingScratch

    num_rows, size = problem.logits.shape
    scratch = SamplingScratch.allocate(max_rows=num_rows, vocab_size=size, device=problem.logits.device)
    scratch.partial_score.fill_(float("nan"))
    scratch.truncation.cut.fill_(float("nan"))
    return scratch


def run_triton(problem, *, scratch=None, **options):
    """Return the tokens [S], having checked what else the sampler writes."""
    from kernels.sampling import triton_draw as triton_sampling

    scratch = make_scratch(problem) if scratch is None else scratch
    out = torch.full((problem.logits.shape[0],), -7, device=problem.logits.device)
    triton_sampling.sample(
        problem.logits, req_index=problem.req_index, positions=problem.positions, state=problem.state, scratch=scratch,
        has_truncation=any(row.is_truncated for row in problem.rows), out=out, **options,
    )  # fmt: skip
    assert int(scratch.arrivals.abs().sum()) == 0
    assert problem.state.last_token[problem.req_index].equal(out.clamp(min=0))
    return out


def truncation_of(problem):
    """The rows' parameters as the specification takes them; None if no row needs it."""
    if not any(row.is_truncated for row in problem.rows):
        return None
    rows, state = problem.req_index, problem.state
    return Truncation(state.top_k[rows], state.top_p[rows], state.min_p[rows], 0)


def assert_tokens_equal(problem, **options):
    """Compare with kernels.sampling.reference.sample, but for rows in which its uniform number rounds to 1."""
    out = run_triton(problem, **options)
    rows, state = problem.req_index, problem.state
    expected = sample(
        problem.logits.float(), temperature=state.temperature[rows], seeds=state.seeds[rows],
        positions=problem.positions, truncation=truncation_of(problem),
    )  # fmt: skip
    ids = torch.arange(problem.logits.shape[1], device=out.device)[None]
    is_finite = gumbel_noise(state.seeds[rows], problem.positions, ids).isfinite().all(dim=-1)
    wrong = ((out != expected) & (is_finite | (state.temperature[rows] == 0))).nonzero().flatten().tolist()
    assert not wrong, [(i, problem.rows[i], int(out[i]), int(expected[i])) for i in wrong]


def assert_kept_equal(problem, scratch=None):
    """Compare what each row keeps with kernels.sampling.reference.truncate after a stable sort (torch.topk leaves ties
    open).

    Where top_p is on, rounding may decide on its last entry. Where it is off, the specification still drops what lies
    past a cumulated mass of 1 in float32, some 1e-7; the kernel does not, so it is asked for a mass of 2 there.
    scratch: a TruncationScratch with the cuts of the problem; without, they are found here.
    """
    from kernels.sampling.triton_truncation import TruncationScratch, find_cuts

    num_rows, size = problem.logits.shape
    if scratch is None:
        scratch = TruncationScratch.allocate(max_rows=num_rows, vocab_size=size, device=problem.logits.device)
        find_cuts(problem.logits, req_index=problem.req_index, state=problem.state, scratch=scratch)
    logits = problem.logits.float()
    temperature = problem.state.temperature[problem.req_index][:, None]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    cut, cut_id, floor = scratch.cut[:, None], scratch.cut_id[:, None], scratch.floor[:, None]
    ids = torch.arange(size, device=logits.device)[None]
    kept = ((logits > cut) | ((logits == cut) & (ids <= cut_id))) & (scaled >= floor)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    truncation = truncation_of(problem)
    truncation = truncation._replace(top_p=torch.where(truncation.top_p < 1, truncation.top_p, 2.0))
    expected = torch.zeros_like(kept).scatter_(1, order, truncate(ordered, truncation).isfinite())
    probs = scaled.double().softmax(dim=-1)
    difference = ((kept ^ expected) * probs).sum(dim=-1).tolist()
    last_kept = probs.masked_fill(~expected, 1.0).amin(dim=-1).tolist()
    for i, row in enumerate(problem.rows):
        if row.is_truncated:
            allowed = 1.01 * last_kept[i] + 1e-5 if row.top_p < 1 else 0.0
            assert difference[i] <= allowed, (row, int(kept[i].sum()), int(expected[i].sum()), difference[i])


def assert_what_is_not_finite_is_no_token(rows, size, **options):
    """Rows with NaN or +inf anywhere become NO_TOKEN, and no other row changes; -inf is a banned token."""
    problem = make_problem(rows, size, **options)
    expected = run_triton(problem)
    bad = (float("nan"), float("inf"))
    for row in range(0, len(rows), 2):
        problem.logits[row, (row * 997 + 5) % size] = bad[row // 2 % 2]
    problem.logits[2] = float("nan")
    expected[::2] = NO_TOKEN
    assert run_triton(problem).equal(expected)
    drawn = sample(
        problem.logits.float(), temperature=problem.state.temperature[problem.req_index],
        seeds=problem.state.seeds[problem.req_index], positions=problem.positions, truncation=truncation_of(problem),
    )  # fmt: skip
    assert (drawn == NO_TOKEN).equal(expected == NO_TOKEN)
