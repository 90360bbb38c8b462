"""Constrained requests in the loop: what they say is valid, whoever is beside them, and nothing of them is left."""

import json
import sys
import threading
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.grammars import COMPILE_TIMEOUT_S
from engine.grammar.compiler import CompilerLoader, GrammarCompiler
from engine.interface.errors import UnsupportedFeature
from engine.interface.protocol import GrammarSpec
from server.structured_output.grammar_spec import choice_grammar, json_schema_grammar, regex_grammar
from tests.support.engine_harness import Harness
from tests.support.grammar_tokens import EOS, compiler, matches, text_of, tokenizer

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
NAMES = st.sampled_from(["a", "b", "ab", "cat"])
LEAVES = st.one_of(
    st.tuples(st.integers(-30, 30), st.integers(0, 90)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.integers(0, 4).map(lambda length: {"type": "string", "maxLength": length}),
    st.lists(st.sampled_from(["a", "ab", "tbt", 7, -12, None, True]), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
)


def schemas(children):
    arrays = st.tuples(children, st.integers(0, 2), st.integers(0, 2)).map(
        lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
    )
    objects = st.dictionaries(NAMES, children, max_size=3).flatmap(
        lambda properties: st.lists(st.sampled_from(sorted(properties) or ["a"]), unique=True).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name in properties],
                "additionalProperties": False,
            }
        )
    )
    return st.one_of(arrays, objects, st.lists(children, min_size=1, max_size=3).map(lambda some: {"anyOf": some}))


SCHEMAS = st.recursive(LEAVES, schemas, max_leaves=4)


def make(depth=2, **settings):
    return Harness(depth=depth, get_compiler=compiler, **{"max_model_len": 400, "num_pages": 400, **settings})


def answer(harness, request_id="a"):
    return text_of(harness.seen[request_id].token_ids)


@given(st.lists(SCHEMAS, min_size=1, max_size=4), st.integers(0, 1000), st.sampled_from([16, 24, 400]))
@settings(max_examples=settings.default.max_examples * 3 // 5, deadline=None)
def test_answers_are_valid_whatever_the_schema_depth_and_preemption(some_schemas, salt, num_pages):
    streams = []
    for depth in (1, 2):
        # the smaller pools hold one long answer or a few short ones
        harness = make(depth, num_pages=num_pages, max_model_len=140)
        for i, schema in enumerate(some_schemas):
            prompt = [salt % 50, i, 7, 8, 9]
            harness.add(f"json{i}", prompt, 120, grammar=json_schema_grammar(schema), stop_token_ids=[EOS])
            harness.add(f"free{i}", [*prompt, 3], 40, stop_token_ids=[EOS])  # checked by the harness
        harness.drain()
        for i, schema in enumerate(some_schemas):
            seen = harness.seen[f"json{i}"]
            assert seen.ends in (["stop"], ["length"])
            if seen.ends == ["stop"]:
                assert matches(schema, json.loads(text_of(seen.token_ids)))
            else:
                assert len(seen.token_ids) == min(120, harness.scheduler.max_num_tokens - 5)
        streams.append(harness.tokens())
    assert streams[0] == streams[1]


@DEPTHS
def test_preempted_answers_go_on_where_they_were(depth):
    regex = regex_grammar("(abc|cab){12}")
    alone = make(depth)
    crowded = make(depth, num_pages=26, max_num_seqs=6)
    for harness, count in ((alone, 1), (crowded, 6)):
        for i in range(count):
            harness.add(f"r{i}", [i + 1, 2, 3], 60, grammar=regex)
        harness.drain()
    assert crowded.scheduler.num_preemptions > 0
    for i in range(6):
        assert len(answer(crowded, f"r{i}")) == 36
    assert crowded.tokens()["r0"] == alone.tokens()["r0"]


@DEPTHS
def test_an_answer_ends_with_the_last_token_that_its_grammar_allows(depth):
    harness = make(depth)
    harness.add("a", [1, 2], 50, grammar=choice_grammar(["abc"]))
    harness.drain()
    seen = harness.seen["a"]
    assert answer(harness) == "abc"
    assert seen.ends == ["stop"]
    assert EOS not in seen.token_ids


@DEPTHS
def test_where_a_grammar_may_end_a_stop_token_ends_it(depth):
    harness = make(depth)
    for i in range(20):
        harness.add(f"r{i}", [i, 2], 60, grammar=regex_grammar("a+"), stop_token_ids=[EOS])
        harness.add(f"endless{i}", [i, 2], 60, grammar=regex_grammar("a+"))
    harness.drain()
    lengths = {len(answer(harness, f"r{i}")) for i in range(20)}
    assert all(set(answer(harness, f"r{i}")) == {"a"} for i in range(20))
    assert len(lengths) > 1
    assert {tuple(harness.seen[f"r{i}"].ends) for i in range(20)} == {("stop",)}
    assert {len(answer(harness, f"endless{i}")) for i in range(20)} == {60}


@DEPTHS
def test_min_tokens_holds_as_far_as_the_grammar_lets_it(depth):
    harness = make(depth)
    for i in range(10):
        harness.add(f"r{i}", [i, 2], 60, grammar=regex_grammar("a+"), stop_token_ids=[EOS], min_tokens=7)
    harness.add("short", [1], 60, grammar=choice_grammar(["ab"]), stop_token_ids=[EOS], min_tokens=7)
    b = tokenizer().token_to_id("b")
    harness.add("banned", [1], 60, grammar=choice_grammar(["abaa"]), stop_token_ids=[EOS, b], min_tokens=7)
    harness.add("stopped", [1], 60, grammar=choice_grammar(["abaa"]), stop_token_ids=[EOS, b])
    harness.drain()
    assert all(len(harness.seen[f"r{i}"].token_ids) >= 7 for i in range(10))
    assert answer(harness, "short") == "ab"
    assert answer(harness, "banned") == "abaa"  # the grammar leaves nothing else
    assert answer(harness, "stopped") == "ab"


@DEPTHS
def test_a_grammar_that_no_token_fits_ends_its_request_and_no_other(depth):
    harness = make(depth)
    harness.add("stuck", [1, 2], 20, grammar=GrammarSpec('start: "abc" "Z"'))
    harness.add("fine", [1, 2], 20, grammar=choice_grammar(["abc"]))
    harness.add("free", [1, 2], 20)
    harness.drain()
    assert harness.seen["stuck"].ends == ["invalid_grammar"]
    assert answer(harness, "stuck") in ("abc", "ab")
    assert answer(harness, "fine") == "abc"


@DEPTHS
def test_a_grammar_that_becomes_too_complex_ends_its_request(depth):
    alternatives = " | ".join(f'"ab{i:b} "'.replace("1", "c").replace("0", "e") for i in range(2500))
    harness = make(depth)
    harness.add("a", [1, 2], 20, grammar=GrammarSpec(f"start: {alternatives}"))
    harness.add("free", [1, 2], 20)
    harness.drain()
    assert harness.seen["a"].ends == ["invalid_grammar"]
    message = next(message for _, message in harness.messages if getattr(message, "code", None))
    assert "cannot be followed" in message.message


@DEPTHS
def test_a_grammar_that_does_not_compile_fails_its_request(depth):
    harness = make(depth)
    harness.add("a", [1, 2], 20, grammar=GrammarSpec("start: nothing"))
    harness.add("empty", [1, 2], 20, grammar=GrammarSpec('start: ""'))
    harness.add("free", [1, 2], 20)
    harness.drain()
    assert harness.seen["a"].ends == harness.seen["empty"].ends == ["invalid_grammar"]


def test_without_a_compiler_a_grammar_is_refused_and_all_else_served():
    harness = Harness()
    harness.add("a", [1, 2], 20, grammar=choice_grammar(["ab"]))
    harness.add("free", [1, 2], 20)
    harness.drain()
    assert harness.seen["a"].ends == ["unsupported_feature"]


class Closed:
    """A compiler that is not there before open()."""

    def __init__(self):
        self.event = threading.Event()
        self.num_compiled = 0

    def __call__(self):
        self.event.wait(60)
        return self

    @property
    def end_token_id(self):
        return compiler().end_token_id

    @property
    def num_words(self):
        return compiler().num_words

    def fill_masks(self, matchers):
        return compiler().fill_masks(matchers)

    def compile(self, spec):
        self.num_compiled += 1
        return compiler().compile(spec)


@DEPTHS
def test_a_pending_request_delays_no_other_and_can_be_aborted(depth):
    closed = Closed()
    harness = Harness(depth=depth, get_compiler=closed)
    spec = choice_grammar(["ab"])
    harness.add("aborted", [1], grammar=spec)
    harness.add("gone", [1], grammar=spec, client_id=2)
    harness.add("waiting", [1], grammar=spec)
    harness.add("free", [1, 2])
    harness.turn(20)
    assert len(harness.seen["free"].token_ids) == 8
    harness.abort("aborted")
    harness.abort("waiting", client_id=2)  # another's
    harness.leave(2)
    harness.turn()
    assert not harness.engine.is_idle
    closed.event.set()
    harness.seen["gone"].ends.append("gone")
    harness.drain()
    assert harness.seen["aborted"].ends == ["abort"]
    assert not harness.seen["aborted"].token_ids
    assert not harness.seen["gone"].token_ids
    assert answer(harness, "waiting") == "ab"


class ClosedToCostly(Closed):
    """Compiles costly grammars only once its event is set."""

    def __call__(self):
        return self

    def compile(self, spec):
        if spec.is_costly:
            self.event.wait(30)
        return super().compile(spec)


def test_a_cheap_grammar_waits_for_no_costly_one():
    closed = ClosedToCostly()
    harness = Harness(get_compiler=closed)
    for i in range(4):
        harness.add(f"costly{i}", [1], grammar=msgspec.structs.replace(choice_grammar([f"ab{i}"]), is_costly=True))
    harness.add("cheap", [1], grammar=choice_grammar(["ab"]))
    for _ in range(2000):
        harness.turn()
        if harness.seen["cheap"].ends:
            break
        time.sleep(0.005)
    assert answer(harness, "cheap") == "ab"
    assert not any(harness.seen[f"costly{i}"].ends for i in range(4))
    closed.event.set()
    harness.drain()
    assert [answer(harness, f"costly{i}") for i in range(4)] == [f"ab{i}" for i in range(4)]


def test_the_tokens_of_a_pending_request_are_queued_tokens():
    closed = Closed()
    harness = Harness(get_compiler=closed, max_queued_tokens=20)
    spec = choice_grammar(["ab"])
    harness.add("a", [1] * 12, grammar=spec)
    harness.add("too_many", [2] * 9, grammar=spec)
    harness.add("free_too_many", [3] * 9)
    harness.turn()
    assert harness.queue_states == []
    harness.add("b", [4] * 8, grammar=spec)
    harness.turn()
    assert harness.queue_states == [True]
    harness.abort("b")
    harness.turn()
    assert harness.queue_states == [True, False]
    closed.event.set()
    harness.drain()
    harness.add("large", [5] * 30, grammar=spec)  # an empty queue takes any
    harness.drain()
    refused = [name for name, seen in harness.seen.items() if seen.ends == ["overloaded"]]
    assert refused == ["too_many", "free_too_many"]
    assert answer(harness, "a") == answer(harness, "large") == "ab"
    assert harness.engine._grammars.num_pending_prompt_tokens == 0


def turn_until(harness, is_done):
    """Turn until the threads that compile have come so far."""
    for _ in range(2000):
        harness.turn()
        if is_done():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


def test_a_grammar_that_takes_too_long_fails_its_requests_alone():
    closed = ClosedToCostly()
    harness = Harness(get_compiler=closed)
    costly = msgspec.structs.replace(choice_grammar(["ab"]), is_costly=True)
    harness.add("a", [1], grammar=costly)
    turn_until(harness, lambda: harness.engine._grammars._taken_s)
    harness.clock.now += COMPILE_TIMEOUT_S * 0.8
    harness.add("late", [1], grammar=costly)
    harness.turn()
    harness.clock.now += COMPILE_TIMEOUT_S * 0.4
    harness.turn()
    assert harness.seen["a"].ends == ["invalid_grammar"]
    assert not harness.seen["late"].ends  # it came later
    harness.clock.now += COMPILE_TIMEOUT_S
    harness.turn()
    assert harness.seen["late"].ends == ["invalid_grammar"]
    closed.event.set()
    harness.drain()


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_request_waits_for_its_grammar_while_those_before_it_become_ready(is_replayed):
    """So its grammar is not blamed for the time that others take."""
    turnstile = Turnstile()
    harness = Harness(get_compiler=turnstile, max_num_seqs=8, num_pages=100)
    if is_replayed:
        harness.add("last", [1], grammar=choice_grammar(["last"]))
        harness.turn()
        turnstile.release()
        harness.crash()
        held, inbox = list(harness.transport.inbox), harness.transport.inbox
        inbox.clear()
    for text in ("b", "bb", "bbb"):
        harness.add(text, [1], grammar=choice_grammar([text]))
    if is_replayed:
        inbox.extend(held)
    else:
        harness.add("last", [1], grammar=choice_grammar(["last"]))
    for text in ("b", "bb", "bbb"):
        harness.turn()
        harness.clock.now += COMPILE_TIMEOUT_S * 0.8
        turnstile.release()
        turn_until(harness, lambda text=text: harness.seen[text].ends)
        assert answer(harness, text) == text
        assert not harness.seen["last"].ends
    turnstile.release()
    harness.drain()
    assert answer(harness, "last") == "last"


def test_a_request_behind_a_grammar_that_hangs_is_refused_for_load_and_not_for_its_grammar():
    closed = Closed()
    harness = Harness(get_compiler=closed)
    harness.add("hangs", [1], grammar=choice_grammar(["ab"]))
    turn_until(harness, lambda: harness.engine._grammars._taken_s)
    harness.add("behind", [1], grammar=choice_grammar(["b"]))
    harness.turn()
    harness.clock.now += COMPILE_TIMEOUT_S
    harness.drain()
    assert harness.seen["hangs"].ends == ["invalid_grammar"]
    assert harness.seen["behind"].ends == ["overloaded"]
    assert harness.messages[-1][1].retry_after_s == COMPILE_TIMEOUT_S
    closed.event.set()


class Turnstile(Closed):
    """Compiles one grammar for each release()."""

    def __init__(self):
        super().__init__()
        self.places = threading.Semaphore(0)

    def __call__(self):
        return self

    def release(self):
        self.places.release()

    def compile(self, spec):
        assert self.places.acquire(timeout=30)
        return super().compile(spec)


@DEPTHS
def test_many_choices_share_one_compilation_and_no_state(depth):
    opened = Closed()
    opened.event.set()
    harness = Harness(depth=depth, get_compiler=opened, max_num_seqs=8)
    for i in range(12):
        harness.add(f"r{i}", [i, 5], 30, grammar=regex_grammar("(ab|ba|cc){5}"))
    harness.drain()
    answers = {answer(harness, f"r{i}") for i in range(12)}
    assert opened.num_compiled == 1
    assert len(answers) > 1
    assert {len(text) for text in answers} == {10}


def test_an_abort_in_mid_answer_frees_it():
    harness = make()
    harness.add("a", [1, 2], 300, grammar=regex_grammar("[ab]{300}"))
    while len(harness.seen["a"].token_ids) < 3:
        harness.turn()
    harness.abort("a")
    harness.drain()
    assert harness.seen["a"].ends == ["abort"]
    harness.add("b", [1, 2], 5, grammar=choice_grammar(["ab"]))
    harness.drain()
    assert answer(harness, "b") == "ab"
    harness.add("free", [1, 2], 5)
    harness.drain()
    assert not harness.engine._grammars.live


def test_the_id_of_a_pending_request_is_refused_a_second_time():
    closed = Closed()
    harness = Harness(get_compiler=closed)
    harness.add("a", [1], grammar=choice_grammar(["ab"]))
    harness.turn()
    harness.add("a", [1, 2], grammar=choice_grammar(["ba"]))
    harness.turn()
    assert harness.seen["a"].ends == ["invalid_parameter"]
    harness.seen["a"].ends.clear()
    closed.event.set()
    harness.drain()
    assert answer(harness) == "ab"


def test_a_prompt_that_could_never_be_served_fails_and_leaves_nothing():
    harness = make(max_model_len=20)
    harness.add("long", [1] * 30, 5, grammar=choice_grammar(["ab"]))
    harness.add("fine", [1, 2], 5, grammar=choice_grammar(["ab"]))
    harness.drain()
    harness.add("free", [1, 2], 5)
    harness.drain()
    assert harness.seen["long"].ends == ["context_length_exceeded"]
    assert answer(harness, "fine") == "ab"
    assert not harness.engine._grammars.live


def test_without_llguidance_it_is_an_unsupported_feature(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedFeature, match="llguidance"):
        GrammarCompiler(tokenizer().to_str().encode())


def test_a_loader_loads_once(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    loader = CompilerLoader(tmp_path)
    loader.start()
    assert loader.get() is loader.get()


def test_a_tokenizer_that_does_not_fit_is_an_unsupported_feature(tmp_path):
    with pytest.raises(UnsupportedFeature, match=r"tokenizer\.json"):
        CompilerLoader(tmp_path).get()
    for text in (b"{", b"{}", b'{"model": {"vocab": {"a": 0}}}'):
        with pytest.raises(UnsupportedFeature):
            GrammarCompiler(text)
