"""bad_words and allowed_token_ids in the loop: what is sampled is what a plain reference allows, at every depth."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor, SuppressTokensLogitsProcessor

from engine.core.grammars import TokenFilter
from engine.interface.protocol import SamplingParams
from server.structured_output.grammar_spec import choice_grammar, regex_grammar
from tests.support.engine_harness import VOCAB_SIZE, Harness, drafters
from tests.support.fake_executor import fake_kv, fake_token
from tests.support.grammar_tokens import EOS, compiler, text_of, tokenizer

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
IDS = st.integers(0, VOCAB_SIZE - 1)
FEW_IDS = st.integers(0, 4)  # so that words are met
WORDS = st.lists(st.lists(FEW_IDS, min_size=1, max_size=4), max_size=8)


def allowed_ids(params: SamplingParams, output: list[int]) -> list[int]:
    """Return what may follow `output`, by the words of the documentation."""
    allowed = []
    for token_id in params.allowed_token_ids or range(VOCAB_SIZE):
        text = [*output, token_id]
        if not any(text[-len(word) :] == word for word in params.bad_words):
            allowed.append(token_id)
    return sorted(set(allowed))


def expected(prompt: list[int], params: SamplingParams, most: int) -> tuple[list[int], str]:
    """Return what an engine over FakeExecutor says, and why it ends."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + params.max_tokens, most):
        output = tokens[len(prompt) :]
        allowed = allowed_ids(params, output)
        if len(output) + 1 < params.min_tokens:
            allowed = [id_ for id_ in allowed if id_ not in params.stop_token_ids] or allowed
        if not allowed:
            return output, "stop"
        history = [fake_kv(position, token_id, 0) for position, token_id in enumerate(tokens)]
        tokens.append(allowed[fake_token(history, len(allowed))])
        if tokens[-1] in params.stop_token_ids and len(output) + 1 >= params.min_tokens:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


@given(WORDS, st.lists(IDS, max_size=6), st.lists(FEW_IDS, max_size=12))
@settings(deadline=None)
def test_a_mask_is_what_the_reference_and_transformers_leave(words, allowed, output):
    params = SamplingParams(max_tokens=1, bad_words=words, allowed_token_ids=allowed)
    mask = np.full(-(-VOCAB_SIZE // 32), 0xFFFFFFFF, dtype=np.uint32)
    TokenFilter(params, vocab_size=VOCAB_SIZE).apply(mask, output)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    assert np.flatnonzero(bits).tolist() == allowed_ids(params, output)

    # transformers looks at prompts, too, and needs one: here of a token that is in no word
    input_ids, scores = torch.tensor([[VOCAB_SIZE - 1, *output]]), torch.zeros(1, VOCAB_SIZE)
    if words:
        scores = NoBadWordsLogitsProcessor(words, eos_token_id=None)(input_ids, scores)
    if allowed:
        suppressed = sorted(set(range(VOCAB_SIZE)) - set(allowed))
        scores = SuppressTokensLogitsProcessor(suppressed)(input_ids, scores)
    assert torch.isfinite(scores[0]).nonzero().flatten().tolist() == allowed_ids(params, output)


@given(st.data(), st.sampled_from([12, 33]))
@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 5)
def test_every_depth_says_what_the_reference_says_also_preempted_and_beside_drafts(data, num_pages):
    requests = [
        (
            data.draw(st.lists(IDS, min_size=1, max_size=6)),
            SamplingParams(
                max_tokens=data.draw(st.integers(1, 24)),
                bad_words=data.draw(WORDS),
                allowed_token_ids=data.draw(st.sampled_from([[], [0, 1, 2, 3, 4, 5], list(range(6, 30))])),
                stop_token_ids=data.draw(st.sampled_from([[], [3], [7, 8, 9]])),
            ),
        )
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    for depth in (1, 2):
        harness = Harness(depth=depth, num_pages=num_pages, make_drafter=drafters(3), max_num_samples=12)
        for i, (prompt, params) in enumerate(requests):
            fields = {name: getattr(params, name) for name in ("bad_words", "allowed_token_ids", "stop_token_ids")}
            harness.add(f"r{i}", prompt, params.max_tokens, **fields)
            harness.add(f"free{i}", [*prompt, 1], 12)  # checked by the harness
        harness.drain()
        for i, (prompt, params) in enumerate(requests):
            seen = harness.seen[f"r{i}"]
            if seen.params.has_filter and seen.ends != ["invalid_parameter"]:
                token_ids, reason = expected(prompt, params, harness.scheduler.max_num_tokens)
                assert (seen.token_ids, seen.ends) == (token_ids, [reason])


@DEPTHS
def test_where_no_token_is_left_the_answer_ends_with_stop(depth):
    harness = Harness(depth=depth)
    harness.add("a", [1, 2], 20, allowed_token_ids=[7], bad_words=[[7, 7, 7]])
    harness.add("b", [1, 2], 20, allowed_token_ids=[7])
    harness.add("free", [1, 2], 20)
    harness.drain()
    assert (harness.seen["a"].token_ids, harness.seen["a"].ends) == ([7, 7], ["stop"])
    assert (harness.seen["b"].token_ids, harness.seen["b"].ends) == ([7] * 20, ["length"])


@DEPTHS
def test_stop_tokens_wait_for_min_tokens_unless_they_are_all_that_is_left(depth):
    harness = Harness(depth=depth)
    for i in range(10):
        harness.add(f"r{i}", [i, 2], 30, allowed_token_ids=[5, 6], stop_token_ids=[6], min_tokens=9)
    harness.add("all", [1, 2], 20, allowed_token_ids=[6], stop_token_ids=[6], min_tokens=3)
    harness.drain()
    assert all(harness.seen[f"r{i}"].token_ids[:8] == [5] * 8 for i in range(10))
    assert harness.seen["all"].token_ids == [6] * 3


@DEPTHS
def test_words_that_leave_nothing_to_begin_with_are_refused(depth):
    harness = Harness(depth=depth)
    harness.add("a", [1, 2], allowed_token_ids=[7, 8], bad_words=[[7], [8], [9]])
    harness.add("all", [1, 2], bad_words=[[id_] for id_ in range(VOCAB_SIZE)])
    harness.add("wrong", [1, 2], bad_words=[[7, VOCAB_SIZE]])
    harness.add("wrong_too", [1, 2], allowed_token_ids=[-1])
    harness.add("free", [1, 2])
    harness.drain()
    assert all(harness.seen[name].ends == ["invalid_parameter"] for name in ("a", "all", "wrong", "wrong_too"))
    sentences = [message.message for _, message in harness.messages if getattr(message, "code", None)]
    assert "The 3 tokens that are bad_words leave none to sample: there are 2 allowed ones." in sentences


@DEPTHS
def test_a_grammar_and_a_filter_hold_together(depth):
    harness = Harness(depth=depth, get_compiler=compiler, max_model_len=400, num_pages=400)
    a, b, c = (tokenizer().token_to_id(letter) for letter in "abc")
    for i in range(10):
        grammar = regex_grammar("[abc]{12}")
        harness.add(f"r{i}", [i, 2], 60, grammar=grammar, bad_words=[[a, b], [c]], stop_token_ids=[EOS])
        harness.add(f"free{i}", [i, 2], 60, grammar=grammar, stop_token_ids=[EOS])
        harness.add(f"endless{i}", [i, 2], 30, grammar=regex_grammar("a+"), allowed_token_ids=[a], stop_token_ids=[EOS])
        harness.add(f"alone{i}", [i, 2], 12, allowed_token_ids=[a, b])
    harness.add("ended", [1], 60, grammar=choice_grammar(["ab", "abc"]), bad_words=[[c]])
    harness.add("torn", [1], 60, grammar=choice_grammar(["abc"]), bad_words=[[c]])
    harness.drain()
    for i in range(10):
        text = text_of(harness.seen[f"r{i}"].token_ids)
        assert len(text) == 12
        assert "c" not in text
        assert "ab" not in text
        assert len(text_of(harness.seen[f"free{i}"].token_ids)) == 12
        assert harness.seen[f"endless{i}"].token_ids == [a] * 30  # its stop token is not among the allowed
        assert set(harness.seen[f"alone{i}"].token_ids) <= {a, b}
    assert text_of(harness.seen["ended"].token_ids) == "ab"
    assert harness.seen["ended"].ends == ["stop"]
    assert harness.seen["torn"].ends == ["invalid_grammar"]  # cut off there, it would not match


@DEPTHS
@pytest.mark.parametrize("fields", [["bad_words"], ["allowed_token_ids"], ["allowed_token_ids", "bad_words"]])
def test_the_error_names_the_fields_that_leave_no_token_to_a_grammar(depth, fields):
    harness = Harness(depth=depth, get_compiler=compiler, max_model_len=400, num_pages=400)
    a, b, c = (tokenizer().token_to_id(letter) for letter in "abc")
    filters = {"bad_words": [[c]], "allowed_token_ids": [a, b]}
    harness.add("torn", [1], 60, grammar=choice_grammar(["abc"]), **{name: filters[name] for name in fields})
    harness.drain()
    (error,) = [message for _, message in harness.messages if getattr(message, "code", None)]
    names = " and ".join(fields)
    assert error.message == f"The answer cannot go on: {names} leave no token that fits its grammar."


@DEPTHS
def test_nothing_is_kept_of_requests_that_ended(depth):
    harness = Harness(depth=depth)
    harness.add("a", [1, 2], 4, allowed_token_ids=[7])
    harness.add("aborted", [1, 2], 40, bad_words=[[7]])
    harness.turn(3)
    harness.abort("aborted")
    harness.drain()
    harness.add("free", [1, 2], 4)
    harness.drain()
    assert not harness.engine._grammars.live
