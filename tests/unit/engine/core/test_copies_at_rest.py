"""After an answer the loop waits for the client's next request before it copies blocks to the host."""

from collections.abc import Callable

import pytest

from engine.core.launch_delay import REST_S
from engine.interface.protocol import AskKv
from tests.support.engine_harness import Harness
from tests.support.layered_harness import PROMPT, host_harness

_REST = -1


class Noted:
    """A transport's receive() that notes the rows of each launched step, and _REST where the loop waits to copy."""

    def __init__(self, harness: Harness, on_rest: Callable[[Harness], None] = lambda harness: None) -> None:
        self._harness, self._on_rest = harness, on_rest
        self._receive, harness.transport.receive = harness.transport.receive, self
        forward = harness.executor.forward
        harness.executor.forward = lambda plan: (self.order.append(plan.num_rows), forward(plan))[1]
        self.order: list[int] = []
        self.rests_s: list[float] = []

    def __call__(self, timeout_s: float | None) -> list:
        if timeout_s and self._harness.scheduler.has_work and self._harness.engine._in_flight is None:
            self.order.append(_REST)
            self.rests_s.append(timeout_s)
            self._on_rest(self._harness)
            self._harness.clock.now += timeout_s
        return self._receive(0)


def answered(on_rest: Callable[[Harness], None] = lambda harness: None) -> tuple[Harness, list[int]]:
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
    def ask(harness: Harness) -> None:
        if "second" not in harness.seen:
            harness.add("second", [5, 6, 7], 2)

    harness, order = answered(ask)
    assert harness.seen["second"].ends == ["length"]
    assert order[order.index(_REST) + 1] == 1
    assert order.count(_REST) == 2


def test_another_message_than_a_request_ends_the_rest():
    _, order = answered(lambda harness: harness.transport.inbox.append((0, AskKv())))
    assert order[order.index(_REST) + 1] == 0


@pytest.mark.parametrize("has_host_memory", [True, False])
def test_nothing_rests_without_host_memory_or_where_no_message_can_come(has_host_memory: bool):
    harness = host_harness(max_copies=1) if has_host_memory else Harness()
    harness.engine.launch_delay.is_on = not has_host_memory
    noted = Noted(harness)
    harness.add("first", PROMPT, 2)
    harness.drain()
    assert harness.seen["first"].ends == ["length"]
    assert noted.rests_s == []
