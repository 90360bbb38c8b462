"""Limits of reasoning in the loop: what is sampled is what a plain reference allows, at any depth, with drafts too."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.speculative import Drafter
from engine.core.thinking import UNLIMITED, ThinkingState
from engine.interface.protocol import ThinkingBudget
from server.structured_output.grammar_spec import regex_grammar
from tests.support.engine_harness import VOCAB_SIZE, Harness, decode_plan, drafters
from tests.support.fake_executor import FakeProposer, fake_kv, fake_token
from tests.support.grammar_tokens import compiler, text_of, tokenizer

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
START, END = 40, 41
FORCED = [30, END, 31]


def budget(max_tokens: int, **fields) -> ThinkingBudget:
    return ThinkingBudget(
        **{"max_tokens": max_tokens, "start_ids": [START], "end_id": END, "forced_ids": FORCED} | fields
    )


def next_ids(limit: ThinkingBudget, output: list[int]) -> list[int]:
    """Return what may follow `output`, by the words of the documentation."""
    opening = limit.opening_ids
    place, left, seen = "inside" if limit.is_open else "before", limit.max_tokens, []
    everything = list(range(VOCAB_SIZE))
    tokens = list(output)
    while True:
        if place == "opening":
            if len(tokens) < len(opening):
                return [opening[len(tokens)]]
            del tokens[: len(opening)]
            place = "inside"
        if place == "inside" and left == 0:
            done = tokens[: len(limit.forced_ids)]
            if len(done) < len(limit.forced_ids):
                return [limit.forced_ids[len(done)]]
            del tokens[: len(done)]
            if limit.not_after_ids:
                if not tokens:
                    return [id_ for id_ in everything if id_ not in limit.not_after_ids]
                tokens.pop(0)
            place, seen = "before" if limit.is_repeated else "over", []
            continue
        if not tokens or place == "over":
            return everything
        token = tokens.pop(0)
        if place == "inside":
            if token == limit.end_id:
                place, seen = "before" if limit.is_repeated else "over", []
            else:
                left -= 1
            continue
        seen.append(token)
        if seen[-len(limit.start_ids) :] == limit.start_ids:
            place = "opening"
            continue
        matched = max(n for n in range(len(limit.start_ids)) if seen[len(seen) - n :] == limit.start_ids[:n])
        if not limit.is_repeated and len(seen) - matched >= 4:
            place = "over"


def expected(prompt: list[int], limit: ThinkingBudget, max_tokens: int) -> list[int]:
    """Return what an engine over FakeExecutor says."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        allowed = next_ids(limit, tokens[len(prompt) :])
        history = [fake_kv(position, token_id, 0) for position, token_id in enumerate(tokens)]
        tokens.append(allowed[fake_token(history, len(allowed))])
    return tokens[len(prompt) :]


# rule: Tools and reasoning: A budget of reasoning tokens ends the reasoning and leaves the answer free
@DEPTHS
@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 7, 50])
def test_reasoning_ends_after_its_tokens(depth, num_drafts, max_tokens):
    limit = budget(max_tokens, is_open=True)
    harness = Harness(depth=depth, make_drafter=drafters(num_drafts), max_num_samples=20)
    harness.add("r", [1, 2, 3], 20, thinking=limit)
    harness.add("other", [1, 2, 3], 20)
    harness.drain()
    tokens = harness.seen["r"].token_ids
    assert tokens == expected([1, 2, 3], limit, 20)
    assert len(tokens) == 20
    if max_tokens < 17:
        assert tokens[max_tokens : max_tokens + 3] == FORCED


LIMITS = st.builds(
    budget,
    st.integers(0, 9),
    start_ids=st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True),
    end_id=st.integers(4, 9),
    forced_ids=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    is_open=st.booleans(),
    is_repeated=st.booleans(),
    not_after_ids=st.lists(st.integers(0, VOCAB_SIZE - 2), max_size=2),
    opening_ids=st.lists(st.integers(0, 12), max_size=2),
)


@settings(deadline=None, max_examples=60)
@given(
    limits=st.lists(LIMITS, min_size=1, max_size=4),
    depth=st.sampled_from([1, 2]),
    num_drafts=st.sampled_from([0, 3]),
    num_pages=st.sampled_from([12, 33]),
)
def test_the_loop_samples_what_the_reference_allows(limits, depth, num_drafts, num_pages):
    """Beside each other, with preemption and with drafts that are partly right."""
    harness = Harness(depth=depth, num_pages=num_pages, make_drafter=drafters(num_drafts), max_num_samples=20)
    for i, limit in enumerate(limits):
        harness.add(f"r{i}", [i + 1, 2, 3], 16, thinking=limit)
    harness.drain()
    for i, limit in enumerate(limits):
        assert harness.seen[f"r{i}"].token_ids == expected([i + 1, 2, 3], limit, 16), limit


@DEPTHS
def test_drafts_go_on_where_nothing_is_forced(depth):
    def always_right(params):
        return Drafter(FakeProposer(errs=False), num_tokens=4, min_tokens=params.min_tokens)

    harness = Harness(depth=depth, make_drafter=always_right, max_num_samples=20)
    harness.add("r", [1, 2, 3], 40, thinking=budget(10, is_open=True))
    harness.drain()
    drafted = [row for plan in harness.executor.plans for row in decode_plan(plan).rows if row.num_drafts]
    assert sum(row.num_drafts for row in drafted) > 8
    assert harness.seen["r"].token_ids == expected([1, 2, 3], budget(10, is_open=True), 40)


@DEPTHS
def test_a_grammar_goes_on_after_the_forced_tokens(depth):
    tokens = tokenizer().encode("abct").ids
    spec = regex_grammar("[ab]*ct[rs]{3}")
    harness = Harness(depth=depth, get_compiler=compiler)
    limit = budget(5, is_open=True, end_id=tokens[2], forced_ids=tokens[2:])
    harness.add("r", [1, 2, 3], 20, grammar=spec, thinking=limit)
    for _ in range(500):
        harness.turn()
        if harness.seen["r"].ends:
            break
    text = text_of(harness.seen["r"].token_ids)
    assert text.partition("ct")[0].strip("ab") == ""
    assert len(text.partition("c")[0]) <= 5
    assert len(text.partition("ct")[2]) == 3
    harness.drain()


@DEPTHS
def test_a_request_whose_grammar_forbids_what_is_forced_ends_with_an_error(depth):
    harness = Harness(depth=depth, get_compiler=compiler)
    wrong = tokenizer().encode("E").ids
    harness.add(
        "r", [1, 2, 3], 20, grammar=regex_grammar("[ab]{4}"), thinking=budget(1, is_open=True, forced_ids=wrong)
    )
    for _ in range(500):
        harness.turn()
        if harness.seen["r"].ends:
            break
    assert harness.seen["r"].ends == ["invalid_grammar"]
    assert len(harness.seen["r"].token_ids) == 1
    harness.drain()


def test_the_number_of_free_tokens():
    state = ThinkingState(budget(2, start_ids=[7, 8], not_after_ids=[1], is_repeated=True))
    assert state.num_free == 4
    state.advance([7])
    assert state.num_free == 3
    state.advance([8])
    assert (state.num_free, state.forced_token) == (2, None)
    state.advance([5, 5])
    assert (state.num_free, state.forced_token, state.is_acting) == (0, FORCED[0], True)
    state.advance(FORCED)
    assert (state.forced_token, state.banned_tokens, state.num_free) == (None, [1], 0)
    state.advance([2, 7, 8])
    assert state.forced_token == FORCED[0], "all of the limit is used"
    named = ThinkingState(budget(2, opening_ids=[5, 6]))
    assert named.num_free == 1
    named.advance([START])
    assert (named.num_free, named.forced_token, named.is_acting) == (0, 5, True)
    named.advance([5, 6])
    assert (named.num_free, named.forced_token) == (2, None)
    ended = ThinkingState(budget(2, is_open=True))
    ended.advance([END])
    assert ended.num_free == UNLIMITED


@pytest.mark.parametrize(
    "fields", [{"max_tokens": -1}, {"end_id": VOCAB_SIZE}, {"forced_ids": []}, {"start_ids": [-1]}, {"start_ids": []}]
)
def test_a_limit_out_of_bounds_ends_its_request(fields):
    harness = Harness()
    harness.add("r", [1], 4, thinking=budget(**{"max_tokens": 1, **fields}))
    harness.drain()
    assert harness.seen["r"].ends == ["invalid_parameter"]
