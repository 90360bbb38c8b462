"""An isolated suspect is alone in its steps: others are set aside until it has a token, and lose nothing by it."""

import threading

import msgspec
import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.interface.protocol import AddRequest, GrammarSpec, SamplingParams, pack_token_ids
from engine.interface.replays import Journal
from tests.support.daemon import wait_for
from tests.support.engine_harness import Harness, Seen, drafters
from tests.support.grammar_tokens import compiler
from tests.unit.engine.core.test_replays import REQUESTS, run

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def isolate(
    harness: Harness,
    num_prompt: int = 3,
    *,
    grammar: GrammarSpec | None = None,
    client_id: int = 2,
    name: str = "isolated",
) -> Seen:
    """Send a request that may have ended two engines."""
    prompt = list(range(3, 3 + num_prompt))
    message = AddRequest(name, pack_token_ids(prompt), SamplingParams(max_tokens=4), 0.0, num_replays=2)
    message = msgspec.structs.replace(message, is_suspect=True, is_isolated=True, grammar=grammar)
    seen = Seen(prompt, message.params, client_id, grammar=grammar, journal=Journal(message))
    harness.seen[name] = seen
    harness.transport.inbox.append((client_id, message))
    return seen


def running(harness: Harness) -> set[str]:
    return {request.request_id for request in harness.scheduler.running}


@DEPTHS
@pytest.mark.parametrize("num_prompt", [3, 40])
def test_others_wait_no_longer_than_an_isolated_request_computes(depth: int, num_prompt: int) -> None:
    harness = Harness(depth=depth, num_pages=200, max_model_len=400, max_num_batched_tokens=16)
    harness.add("long", [2], 300)
    harness.turn(5)
    isolated = isolate(harness, num_prompt)
    harness.add("new", [4], 3)
    num_turns = 0
    while not isolated.token_ids:
        harness.turn()
        num_turns += 1
        assert isolated.token_ids or running(harness) <= {"isolated"}
    assert num_turns <= -(-num_prompt // 16) + 2 * depth
    assert isolated.journal is not None
    assert isolated.journal._was_alone
    harness.turn(2)
    assert {"long", "new"} <= running(harness)
    assert not harness.seen["long"].ends
    harness.drain()


@DEPTHS
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_of_any_kind_that_was_set_aside_has_the_same_answer(kind: str, depth: int) -> None:
    options: dict = REQUESTS[kind]

    def make() -> Harness:
        return Harness(depth=depth, make_drafter=drafters(3 * (depth - 1)), get_compiler=compiler)

    whole = run(make(), options).seen["r"]
    for num_turns in (1, 2, 4, 7):
        harness = make()
        harness.add("beside", [9, 8, 7, 6, 5, 4], 12)
        harness.add("r", list(range(11)), 12, **options)
        harness.turn(num_turns)
        isolate(harness)
        harness.drain()
        seen = harness.seen["r"]
        assert (seen.token_ids, seen.ends) == (whole.token_ids, whole.ends)
        assert (seen.num_logprobs, seen.prompt_logprobs) == (whole.num_logprobs, whole.prompt_logprobs)
        assert (seen.embedding, seen.num_started) == (whole.embedding, 1)
        assert harness.seen["isolated"].ends


class SlowCompiler:
    """A compiler that is not there before it is opened."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> GrammarCompiler:
        self.event.wait(60)
        return compiler()


@DEPTHS
def test_others_run_while_the_grammar_of_an_isolated_request_compiles(depth: int) -> None:
    slow = SlowCompiler()
    harness = Harness(depth=depth, num_pages=200, max_model_len=400, get_compiler=slow)
    harness.add("long", [2], 300)
    harness.turn(5)
    isolated = isolate(harness, grammar=GrammarSpec("start: /[0-9]{6,40}/"))
    harness.turn(10)
    assert running(harness) == {"long"}
    assert len(harness.seen["long"].token_ids) >= 10
    assert isolated.journal is not None
    assert not isolated.journal._was_alone
    slow.event.set()
    while not isolated.token_ids:
        harness.turn()
    assert isolated.journal._was_alone
    harness.drain()


@DEPTHS
def test_others_go_on_when_the_client_of_an_isolated_request_leaves(depth: int) -> None:
    harness = Harness(depth=depth, num_pages=200, max_model_len=400, max_num_batched_tokens=4)
    harness.add("long", [2], 300)
    harness.turn(5)
    isolate(harness, 40)
    harness.turn(4)
    assert running(harness) == {"isolated"}
    harness.leave(2)
    harness.turn(4)
    assert running(harness) == {"long"}
    harness.drain()


@DEPTHS
def test_what_was_set_aside_is_no_suspect_when_the_isolated_request_ends_the_engine(depth: int) -> None:
    harness = Harness(depth=depth, num_pages=200, max_model_len=400, max_num_batched_tokens=16)
    harness.add("other", [2], 300)
    harness.add("own", [3], 300, client_id=2)
    harness.turn(8)
    assert running(harness) == {"other", "own"}
    isolated = isolate(harness, 40)
    while running(harness) != {"isolated"}:
        harness.turn()
    assert not isolated.token_ids
    harness.crash(is_fault=True, max_replays=9)
    assert suspects_sent(harness) == {"isolated"}


@DEPTHS
def test_what_has_its_grammar_while_others_are_set_aside_is_no_suspect(depth: int) -> None:
    slow = SlowCompiler()
    harness = Harness(depth=depth, num_pages=200, max_num_seqs=4, max_num_batched_tokens=4, get_compiler=slow)
    harness.add("compiles", [2], 30, grammar=GrammarSpec("start: /[0-9]{6,40}/"))
    isolated = isolate(harness, 40)
    harness.turn(depth + 1)
    assert running(harness) == {"isolated"}
    slow.event.set()
    wait_for(lambda: bool(harness.engine._grammars._done), timeout_s=60, what="a grammar")
    harness.turn(2)
    assert "compiles" in harness.scheduler.requests
    assert running(harness) == {"isolated"}
    assert not isolated.token_ids
    harness.crash(is_fault=True, max_replays=9)
    assert suspects_sent(harness) == {"isolated"}


def suspects_sent(harness: Harness) -> set[str]:
    """The suspects among the requests that have been submitted to the next engine."""
    messages = [message for _, message in harness.transport.inbox if isinstance(message, AddRequest)]
    return {message.request_id for message in messages if message.is_suspect}


@DEPTHS
def test_what_goes_on_behind_an_isolated_request_may_end_the_engine_again(depth: int) -> None:
    harness = Harness(depth=depth, num_pages=200, max_model_len=400, max_num_batched_tokens=16)
    harness.add("other", [2], 300)
    harness.turn(5)
    isolated = isolate(harness)
    while not isolated.token_ids or "other" not in running(harness):
        harness.turn()
    other = harness.seen["other"].journal
    assert other is not None
    assert other.is_begun
    harness.crash(is_fault=True)
    assert suspects_sent(harness) >= {"other"}


@DEPTHS
def test_others_run_while_the_grammar_of_a_second_isolated_request_compiles(depth: int) -> None:
    slow = SlowCompiler()
    harness = Harness(depth=depth, num_pages=200, max_model_len=400, get_compiler=slow)
    harness.add("long", [2], 300)
    harness.turn(5)
    first = isolate(harness)
    second = isolate(harness, grammar=GrammarSpec("start: /[0-9]{6,40}/"), name="second")
    harness.turn(10)
    assert first.token_ids
    assert not second.token_ids
    assert "long" in running(harness)
    slow.event.set()
    harness.drain()
