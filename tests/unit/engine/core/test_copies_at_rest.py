"""After an answer the loop waits for the client's next request before it copies blocks to the host."""

from collections.abc import Callable

import pytest

from engine.core.launch_delay import REST_S
from tests.support.engine_harness import Harness
from tests.support.layered_harness import PROMPT, host_harness

_REST = -1


class Noted:
    """A transport's receive() that notes the rows of each launched step, and _REST where the loop waits to copy."""

    def __init__(self, harness: Harness, on_rest: Callable[[Harness], float] = lambda harness: 0.0) -> None:
        """on_rest: returns after how long a message comes, in seconds; 0: none comes."""
        self._harness, self._on_rest = harness, on_rest
        self._receive, harness.transport.receive = harness.transport.receive, self
        forward = harness.executor.forward
        harness.executor.forward = lambda plan: (self.order.append(plan.num_rows), forward(plan))[1]
        self.order: list[int] = []
        self.rests_s: list[float] = []
        self.timeouts_s: list[float | None] = []

    def __call__(self, timeout_s: float | None) -> list:
        self.timeouts_s.append(timeout_s)
        if timeout_s and self._harness.scheduler.has_work and self._harness.engine._in_flight is None:
            self.order.append(_REST)
            self.rests_s.append(timeout_s)
            self._harness.clock.now += self._on_rest(self._harness) or timeout_s
        return self._receive(0)


def answered(on_rest: Callable[[Harness], float] = lambda harness: 0.0) -> tuple[Harness, list[int]]:
    harness = host_harness(max_copies=1)
    noted = Noted(harness, on_rest)
    harness.add("first", PROMPT, 2)
    harness.drain()
    assert all(0 < rest_s <= REST_S for rest_s in noted.rests_s)
    assert harness.executor.num_to_host > 2
    return harness, noted.order


def test_the_loop_rests_once_before_copies_that_follow_an_answer():
    _, order = answered()
    first = order.index(_REST)
    assert 0 not in order[:first]
    assert order[first + 1 :] == [0] * (len(order) - first - 1)
    assert len(order) > first + 2


def test_a_request_that_comes_meanwhile_is_in_the_next_step():
    def ask(harness: Harness) -> float:
        if "second" in harness.seen:
            return 0.0
        harness.add("second", [5, 6, 7], 2)
        return 0.001

    harness, order = answered(ask)
    assert harness.seen["second"].ends == ["length"]
    assert order[order.index(_REST) + 1] == 1
    assert order.count(_REST) == 2


@pytest.mark.parametrize("comes", [True, False])
def test_a_request_that_ends_the_rest_is_planned_at_once(comes: bool):
    def ask(harness: Harness) -> float:
        harness.engine._is_at_tier = True  # as while slots of host memory become ready
        if comes and "second" not in harness.seen:
            harness.add("second", [5, 6, 7], 2)
            return 0.001
        return 0.0

    harness = host_harness(max_copies=1)
    noted = Noted(harness, ask)
    harness.add("first", PROMPT, 2)
    while not noted.rests_s:
        harness.engine._is_at_tier = True
        harness.engine.run_once()
    assert noted.timeouts_s[-1] == (0 if comes else 0.001)


def test_nothing_rests_where_no_message_can_come():
    harness = host_harness(max_copies=1)
    harness.engine.launch_delay.is_on = False
    noted = Noted(harness)
    harness.add("first", PROMPT, 2)
    harness.drain()
    assert 0 in noted.order
    assert noted.rests_s == []


@pytest.mark.parametrize("what", ["grammars", "outbox", "exchange", "suspects"])
def test_nothing_rests_while_something_else_is_to_be_done(what: str, monkeypatch: pytest.MonkeyPatch):
    harness = host_harness(max_copies=1)
    noted = Noted(harness)
    harness.add("first", PROMPT, 2)
    while not harness.seen["first"].ends:
        harness.turn()
    engine = harness.engine
    assert engine._has_only_copies
    assert harness.scheduler.has_work
    if what == "grammars":
        monkeypatch.setattr(engine._grammars, "compiling", {})
        monkeypatch.setattr(engine, "_queue_compiled", lambda: None)
        monkeypatch.setitem(engine._grammars.pending, "waits", None)
    else:
        owner, name = {
            "outbox": (type(engine._outbox), "is_empty"),
            "exchange": (type(harness.scheduler.kv.tiers), "is_exchanging"),
            "suspects": (type(engine._suspects), "is_holding"),
        }[what]
        monkeypatch.setattr(owner, name, property(lambda self: what != "outbox"))
    assert not engine._has_only_copies
    launched = len(noted.order)
    harness.turn()
    assert noted.rests_s == []
    assert noted.order[launched:] == [0]
