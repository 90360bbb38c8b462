"""The sampling specification: distributions, truncation against a naive loop, penalties, stateless noise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling.reference import (
    Truncation,
    add_bias,
    allow_only,
    apply_penalties,
    gumbel_noise,
    sample,
    top_logprobs,
    truncate,
)


def _truncation(rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, max_top_k: int = 0) -> Truncation:
    return Truncation(torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p), max_top_k)


def _draw(logits: torch.Tensor, num_draws: int, **truncation: float) -> torch.Tensor:
    """Return the empirical distribution over one row's entries."""
    rows = logits.expand(num_draws, -1).contiguous()
    token_ids = sample(
        rows,
        temperature=torch.ones(num_draws),
        seeds=torch.arange(num_draws) * 7919,
        positions=torch.arange(num_draws),
        truncation=_truncation(num_draws, **truncation) if truncation else None,
    )
    return torch.bincount(token_ids, minlength=logits.shape[-1]) / num_draws


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    assert (_draw(logits, 40_000) - logits.softmax(-1)).abs().max() < 0.012


def test_truncated_draws_follow_the_renormalised_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    drawn = _draw(logits, 40_000, top_k=2, max_top_k=2)
    expected = torch.tensor([math.exp(2), math.exp(1), 0, 0, 0]) / (math.exp(2) + math.exp(1))
    assert (drawn - expected).abs().max() < 0.012


@settings(max_examples=settings.default.max_examples * 3 // 5, deadline=None)
@given(
    values=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=30, unique=True),
    top_k=st.integers(0, 35),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_truncate_keeps_what_the_definitions_keep(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor(sorted(values, reverse=True))
    kept = truncate(logits[None], _truncation(1, top_k, top_p, min_p))[0].isfinite()
    among_k = logits[: top_k or len(values)].double().softmax(-1)
    relative = (logits.double() - logits[0].double()).exp()
    for i in range(len(values)):
        in_k = i < (top_k or len(values))
        mass_before = float(among_k[:i].sum()) if in_k else 1.0
        if abs(mass_before - top_p) < 1e-5 or abs(float(relative[i]) - min_p) < 1e-5:
            continue  # rounding decides
        assert bool(kept[i]) == (i == 0 or (in_k and mass_before < top_p and float(relative[i]) >= min_p))


def test_restricting_to_the_largest_top_k_changes_nothing() -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 300)
    top_k = torch.randint(1, 20, (16,))
    arguments = {"temperature": torch.rand(16) + 0.1, "seeds": torch.arange(16), "positions": torch.arange(16)}
    whole = Truncation(top_k, torch.full((16,), 0.9), torch.full((16,), 0.05), 0)
    narrow = whole._replace(max_top_k=20)
    assert sample(logits, **arguments, truncation=whole).equal(sample(logits, **arguments, truncation=narrow))


def test_temperature_zero_is_the_argmax_whatever_the_rest() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 50)
    temperature = torch.tensor([0.0, 1.0] * 4)
    token_ids = sample(
        logits, temperature=temperature, seeds=torch.zeros(8, dtype=torch.int64), positions=torch.arange(8),
        truncation=_truncation(8, top_p=0.5),
    )  # fmt: skip
    assert token_ids[::2].equal(logits.argmax(-1)[::2])


def test_noise_of_a_row_does_not_depend_on_its_batch() -> None:
    seeds, positions = torch.tensor([3, 2**62, 5]), torch.tensor([0, 9, 100_000])
    token_ids = torch.arange(1000)[None]
    together = gumbel_noise(seeds, positions, token_ids)
    for row in range(3):
        assert gumbel_noise(seeds[row : row + 1], positions[row : row + 1], token_ids)[0].equal(together[row])
    some = torch.tensor([[7, 500, 3]])
    assert gumbel_noise(seeds, positions, some).equal(together[:, some[0]])


@pytest.mark.parametrize("other", [(4, 10), (3, 11), (3 + 2**32, 10)])
def test_noise_differs_by_seed_and_position(other: tuple[int, int]) -> None:
    token_ids = torch.arange(20_000)[None]
    first = gumbel_noise(torch.tensor([3]), torch.tensor([10]), token_ids)[0]
    second = gumbel_noise(torch.tensor([other[0]]), torch.tensor([other[1]]), token_ids)[0]
    assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 0.03
    assert abs(float(first.mean()) - 0.5772) < 0.04
    assert first.isfinite().all()


def test_penalties_match_the_formulas() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    counts = torch.tensor([[2, 1, 0, 0]], dtype=torch.int32)
    in_prompt = torch.tensor([[False, False, True, False]])
    result = apply_penalties(
        logits, counts, in_prompt,
        presence=torch.tensor([0.3]), frequency=torch.tensor([0.2]), repetition=torch.tensor([2.0]),
    )  # fmt: skip
    expected = torch.tensor([[0.5 - 0.4 - 0.3, -2.0 - 0.2 - 0.3, 1.0, 0.5]])
    torch.testing.assert_close(result, expected)


def test_bias_adds_up_and_bans() -> None:
    logits = torch.zeros(2, 3)
    add_bias(logits, torch.tensor([0, 0, 1]), torch.tensor([1, 1, 2]), torch.tensor([1.0, 2.0, float("-inf")]))
    assert logits.tolist() == [[0.0, 3.0, 0.0], [0.0, 0.0, float("-inf")]]


def test_a_tokens_logprob_is_the_same_in_both_lists() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 100, dtype=torch.bfloat16)
    token_ids = logits.argmax(-1)
    chosen, ids, values = top_logprobs(logits, token_ids, 3)
    assert ids[:, 0].equal(token_ids)
    assert values[:, 0].equal(chosen)


def test_noise_is_finite_even_for_the_largest_hash() -> None:
    logits = torch.full((1, 151_936), -50.0)
    logits[0, 5] = 50.0
    drawn = sample(logits, temperature=torch.ones(1), seeds=torch.tensor([720]), positions=torch.tensor([7]))
    assert drawn.item() == 5


def test_a_bitmask_forbids_what_has_no_bit() -> None:
    logits = torch.zeros(3, 40)
    allow_only(logits, torch.tensor([2, 0]), torch.tensor([[0b101, 0b1], [-1, -1]], dtype=torch.int32))
    assert logits[2].isfinite().nonzero().flatten().tolist() == [0, 2, 32]
    assert logits[:2].isfinite().all()
