"""A step is launched shortly before the one in flight ends, so that a request of the meantime waits for one step."""

import heapq
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.simulation import GPU, Arrival, Machine, Simulation
from engine.core.launch_delay import REST_S, LaunchDelay
from engine.core.planned_step import PlannedStep
from engine.core.step import StepHandle, StepPlan
from engine.interface.protocol import ClientGone, ToEngine

_FLOOD = [Arrival(0.0, i, "flood", 40 + 97 * i % 700, 16 + 31 * i % 200) for i in range(300)]
_GUESTS = [Arrival(0.5 + 0.617 * i, i, "guest", 512, 8) for i in range(14)]
_UNTIL_S = 9.5


class Recorded(Simulation):
    """A simulation that notes when the device began and ended each step."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(max_queue_wait_s=None, machine=machine)
        self.steps: list[tuple[float, float]] = []
        forward = self.executor.forward

        def noted(plan: Any) -> Any:
            before_s = self.steps[-1][1] if self.steps else 0.0
            step = forward(plan)
            self.steps.append((max(before_s, self.executor.now_s), step._end_s))
            return step

        self.executor.forward = noted  # type: ignore[method-assign]

    def num_steps(self, from_s: float, to_s: float) -> int:
        """Return how many steps end between two times, the second one included."""
        return sum(from_s < end_s <= to_s + 1e-9 for _, end_s in self.steps)


def flooded(machine: Machine) -> Recorded:
    simulation = Recorded(machine)
    simulation.run(heapq.merge(_FLOOD, _GUESTS), until_s=_UNTIL_S)
    return simulation


def waits(simulation: Recorded) -> list[int]:
    """Return the steps that each of the other key's requests waited for, its own included."""
    found = [o for o in simulation.outcomes.values() if o.arrival.tenant == "guest" and o.ttft_s is not None]
    return [simulation.num_steps(o.arrival.at_s, o.arrival.at_s + (o.ttft_s or 0.0)) for o in found[2:]]


@pytest.mark.slow
def test_a_request_waits_for_the_step_in_flight_and_its_own_beside_another_keys_flood() -> None:
    at_once, delayed = waits(flooded(GPU._replace(delays_launches=False))), waits(flooded(GPU))
    assert len(delayed) == len(at_once) == len(_GUESTS) - 2
    assert set(at_once) == {3}
    # one that comes when the next step has just been launched waits for that, too
    assert set(delayed) <= {2, 3}
    assert delayed.count(2) >= 9


@pytest.mark.slow
def test_the_device_hardly_waits_for_delayed_launches() -> None:
    for unevenness, most in ((0.0, 0.001), (0.3, 0.005)):
        simulation = flooded(GPU._replace(unevenness=unevenness))
        delay = simulation.engine.launch_delay
        assert delay is not None
        assert delay.num_delayed > 100
        assert delay.num_late < delay.num_delayed / 20
        pairs = itertools.pairwise(simulation.steps)
        assert sum(max(begun_s - end_s, 0.0) for (_, end_s), (begun_s, _) in pairs) < most * _UNTIL_S


@pytest.mark.slow
def test_with_one_key_a_request_waits_for_the_step_in_flight_and_its_own() -> None:
    rows = [Arrival(0.0, i, "flood", 40 + 97 * i % 700, 400) for i in range(40)]  # they leave rows and queue free
    same_key = [guest._replace(tenant="flood", number=1000 + guest.number) for guest in _GUESTS]
    counts = []
    for delays_launches in (False, True):
        simulation = Recorded(GPU._replace(delays_launches=delays_launches))
        simulation.run(heapq.merge(rows, same_key), until_s=_UNTIL_S)
        found = [o for o in simulation.outcomes.values() if o.arrival.number >= 1000]
        counts.append([simulation.num_steps(o.arrival.at_s, o.arrival.at_s + (o.ttft_s or 0.0)) for o in found[:4]])
    assert set(counts[0]) == {3}
    assert set(counts[1]) <= {2, 3}
    assert counts[1].count(2) >= 3


@pytest.mark.slow
def test_with_one_key_nothing_is_delayed_while_requests_wait() -> None:
    many = [Arrival(0.0, i, "flood", 40 + 97 * i % 700, 16 + 31 * i % 200) for i in range(1000)]
    outcomes = []
    for delays_launches in (False, True):
        simulation = Recorded(GPU._replace(delays_launches=delays_launches))
        outcomes.append(simulation.run(iter(many), until_s=_UNTIL_S / 4))
        assert simulation.engine.launch_delay is not None
        assert simulation.engine.launch_delay.num_delayed == 0
    assert outcomes[0] == outcomes[1]


def test_where_one_step_is_in_flight_nothing_is_delayed() -> None:
    assert Recorded(GPU._replace(is_blocking=True)).engine.launch_delay is None


class Waiting:
    """A queue of so many requests."""

    def __init__(self, num_requests: int, *, has_several_tenants: bool) -> None:
        self.num_requests, self.has_several_tenants = num_requests, has_several_tenants

    def __len__(self) -> int:
        return self.num_requests


class Device:
    """A clock, a step in flight that ends at end_s, and messages that come at their time."""

    def __init__(
        self,
        *coming: tuple[float, str],
        num_tenants: int = 2,
        num_waiting: int = 0,
        num_free_rows: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self.now_s, self.end_s = 10.0, 10.0
        self.coming = list(coming)
        self.received: list[str] = []
        self.timeouts_s: list[float] = []
        self.num_tokens = self.num_next_tokens = 100  # of the step in flight, and of the next one
        self.num_rows = 1  # of the next step
        kv = SimpleNamespace(late=self, tiers=SimpleNamespace(is_polled=False, is_exchanging=False))
        scheduler = SimpleNamespace(
            kv=kv,
            waiting=Waiting(num_waiting, has_several_tenants=num_tenants > 1),
            num_free_rows=num_free_rows,
            requests={},
            config=SimpleNamespace(step_sizes=[64, 128, 256]),
        )
        self.delay = LaunchDelay(cast(Any, scheduler), cast(Any, self), lambda: self.now_s, num_ranks=num_ranks)

    def publish_while(self, has_time: Callable[[], bool]) -> None:
        assert has_time()

    def is_done(self) -> bool:
        return self.now_s >= self.end_s

    def receive(self, timeout_s: float) -> list[tuple[int, str]]:
        self.timeouts_s.append(timeout_s)
        next_s = min([at_s for at_s, _ in self.coming], default=float("inf"))
        self.now_s = min(self.now_s + timeout_s, max(next_s, self.now_s))
        arrived = [(1, name) for at_s, name in self.coming if at_s <= self.now_s]
        self.coming = [(at_s, name) for at_s, name in self.coming if at_s > self.now_s]
        return arrived

    def handle(self, client_id: int, message: ToEngine | ClientGone) -> None:
        self.received.append(cast(str, message))

    def rest(self, while_: Callable[[], bool] = lambda: True) -> None:
        self.delay.rest(self.handle, while_=while_)

    def run_step(self, seconds: float, *, host_s: float = 0.0) -> float:
        """Run a step of so many seconds beside the next launch; return how long before its end it was planned."""
        begun_s, self.end_s = self.now_s, self.now_s + seconds
        self.delay.receive(cast(StepHandle, self), begun_s, self.handle)
        early_s = self.end_s - self.now_s
        self.now_s += host_s
        num_tokens, self.num_tokens = self.num_tokens, self.num_next_tokens
        plan = SimpleNamespace(num_tokens=self.num_tokens, num_rows=self.num_rows)
        self.delay.note_launch(cast(StepHandle, self), cast(StepPlan, plan))
        self.now_s = max(self.now_s, self.end_s)
        step = SimpleNamespace(num_tokens=lambda: (num_tokens, 0))
        self.delay.note_commit(cast(PlannedStep, step), begun_s, self.now_s)
        return early_s


def test_messages_are_handled_until_the_launch_and_the_later_ones_left() -> None:
    device = Device((10.065, "first"), (10.075, "second"), (10.0797, "third"))
    for _ in range(3):
        assert device.run_step(0.02) == pytest.approx(0.02)  # its time is not known yet
    assert 0.0005 < device.run_step(0.02) <= 0.0015 + 1e-9
    assert device.received == ["first", "second"]
    assert [name for _, name in device.coming] == ["third"]


def test_the_loop_waits_for_whole_milliseconds_since_epoll_rounds_up() -> None:
    device = Device()
    for _ in range(4):
        device.run_step(0.0207)
    assert set(device.timeouts_s) == {0.001}


def test_a_launch_comes_earlier_by_what_the_host_needs() -> None:
    device = Device()
    for _ in range(4):
        device.run_step(0.02, host_s=0.003)
    assert 0.0035 < device.run_step(0.02, host_s=0.003) <= 0.0045 + 1e-9


def test_a_step_that_ends_early_delays_the_next_one_by_a_millisecond_and_later_launches_come_earlier() -> None:
    device = Device()
    for _ in range(4):
        device.run_step(0.02)
    assert device.run_step(0.01) >= -0.001 - 1e-9
    assert device.delay.num_late == 1
    assert device.run_step(0.02) > 0.009  # the shortest step of its size counts
    for _ in range(8):
        device.run_step(0.02)
    assert 0.0009 < device.run_step(0.02) <= 0.002


def test_a_long_first_step_of_a_size_is_not_believed() -> None:
    device = Device()
    device.run_step(3.0)
    for _ in range(2):
        device.run_step(0.02)
    device.run_step(0.02)
    assert device.delay.num_late == 0


def test_a_step_takes_as_long_as_a_smaller_one_at_least() -> None:
    device = Device()
    for _ in range(3):
        device.run_step(0.02)
    for num_tokens, seconds, early_s in ((200, 0.05, 0.031), (60, 0.01, 0.01), (1000, 0.05, 0.031)):
        device.num_next_tokens = num_tokens
        device.run_step(0.02)
        device.num_next_tokens = 100
        assert device.run_step(seconds) == pytest.approx(early_s, abs=0.0006)


def test_a_host_that_was_slow_once_delays_launches_again_soon() -> None:
    device = Device()
    for _ in range(4):
        device.run_step(0.02)
    device.run_step(0.02, host_s=5.0)
    assert device.run_step(0.02) == pytest.approx(0.02)
    for _ in range(250):
        device.run_step(0.02)
    assert device.run_step(0.02) < 0.003


@pytest.mark.parametrize(
    ("num_tenants", "num_waiting", "num_free_rows", "num_ranks", "is_delayed"),
    [
        (1, 0, 1, 1, True),
        (1, 1, 5, 1, False),
        (1, 0, 0, 1, False),
        (1, 0, 1, 2, False),
        (2, 7, 0, 1, True),
        (2, 7, 0, 2, True),
    ],
)
def test_one_tenants_launches_are_delayed_while_a_request_that_comes_has_room(
    num_tenants: int, num_waiting: int, num_free_rows: int, num_ranks: int, is_delayed: bool
) -> None:
    device = Device(num_tenants=num_tenants, num_waiting=num_waiting, num_free_rows=num_free_rows, num_ranks=num_ranks)
    early_s = [device.run_step(0.02) for _ in range(4)][-1]
    assert (early_s < 0.002) == is_delayed
    assert bool(device.timeouts_s) == is_delayed


def test_a_message_beside_copies_alone_is_handled_when_it_comes() -> None:
    device = Device((10.0212, "first"), (10.0213, "second"))
    device.num_rows = 0
    device.run_step(0.02)
    assert device.run_step(0.002) == pytest.approx(0.0008)
    assert device.received == ["first"]
    assert device.run_step(0.002) == pytest.approx(0.002)
    assert device.received == ["first", "second"]
    assert device.run_step(0.002) == pytest.approx(-0.001)  # none comes: until they are found to be done


def test_copies_of_a_request_are_waited_for() -> None:
    device = Device((10.0212, "first"))
    device.num_rows = 0
    device.run_step(0.02)
    cast(Any, device.delay._scheduler).requests["waits for them"] = None
    device.delay._scheduler.waiting = cast(Any, Waiting(1, has_several_tenants=False))
    assert device.run_step(0.002) == pytest.approx(0.002)
    assert device.received == []


def test_copies_for_another_engine_follow_each_other_at_once() -> None:
    device = Device((10.0212, "first"))
    device.num_rows = 0
    device.run_step(0.02)
    device.delay._scheduler.kv.tiers = cast(Any, SimpleNamespace(is_polled=False, is_exchanging=True))
    assert device.run_step(0.002) == pytest.approx(0.002)
    assert device.received == []


def test_copies_alone_tell_nothing_of_the_time_of_small_steps() -> None:
    device = Device()
    device.num_rows = device.num_next_tokens = 0
    for _ in range(10):
        device.run_step(0.01)
    device.num_rows = device.num_next_tokens = 1
    device.run_step(0.01)
    device.timeouts_s.clear()
    assert device.run_step(0.0008) == pytest.approx(0.0008)
    assert device.timeouts_s == []


@pytest.mark.parametrize("seconds", [0.0014, 0.02])
def test_short_steps_are_not_delayed_and_none_where_it_is_turned_off(seconds: float) -> None:
    device = Device()
    device.delay.is_on = seconds < 0.002
    for _ in range(6):
        assert device.run_step(seconds) == pytest.approx(seconds)
    assert not device.timeouts_s


def test_copies_alone_rest_after_the_last_token_but_not_between_each_other() -> None:
    device = Device((10.021, "first"), (10.023, "second"), (10.026, "third"))
    device.run_step(0.02)
    device.rest()
    assert device.received == ["first", "second"]
    assert device.now_s == pytest.approx(10.02 + REST_S)
    device.timeouts_s.clear()
    device.num_tokens = device.num_next_tokens = device.num_rows = 0
    device.run_step(0.0001)
    device.timeouts_s.clear()
    device.rest()
    assert device.timeouts_s == []


def test_a_request_ends_the_rest() -> None:
    device = Device((10.021, "a request"))
    device.run_step(0.02)
    device.rest(while_=lambda: not device.received)
    assert device.now_s == pytest.approx(10.021)


def test_nothing_rests_where_no_message_can_come() -> None:
    device = Device()
    device.delay.is_on = False
    device.run_step(0.02)
    device.rest()
    assert device.timeouts_s == []
