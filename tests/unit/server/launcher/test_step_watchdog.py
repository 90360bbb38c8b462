"""When an engine counts as stalled, on a clock of the tests' own."""

from collections.abc import Callable

from engine.interface.control import LOAD_STALL_AFTER_S, Heartbeat
from server.launcher.engine_health import StepWatchdog


class Timer:
    """One call that is due at a time, unless it is cancelled."""

    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s = due_s
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """Time that passes when a test says so, and what is due then."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self.timers if timer.due_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer.due_s > self.now_s]
        for timer in due:
            if not timer.is_cancelled:
                timer.call()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now_s + delay_s, call))
        return self.timers[-1]


class Watched(Clock):
    """A watch with a limit of 10 s, its clock, and what it reported."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[bool] = []
        self.hangs: list[float] = []
        self.watch = StepWatchdog(
            self.changes.append,
            stall_after_s=10.0,
            on_hang=lambda: self.hangs.append(self.now_s),
            hang_after_s=30.0,
            call_later=self.call_later,
            clock=lambda: self.now_s,
        )
        self.watch.start()

    def beat(self, *, step_id: int = 5, num_running: int = 0, num_waiting: int = 0, after_s: float = 1.0) -> None:
        self.wait(after_s)
        self.watch.beat(Heartbeat(num_running, num_waiting, step_id))


def test_an_idle_engine_that_beats_is_fine() -> None:
    watched = Watched()
    for _ in range(100):
        watched.beat()
    assert watched.changes == []


def test_silence_is_a_stall_and_the_next_beat_its_end() -> None:
    watched = Watched()
    watched.beat()
    watched.wait(9)
    assert watched.changes == []
    watched.wait(1)
    assert watched.changes == [True]
    watched.wait(100)
    assert watched.changes == [True]
    watched.beat()
    assert watched.changes == [True, False]
    watched.beat()
    watched.wait(10)
    assert watched.changes == [True, False, True]


def test_an_engine_that_never_beats_is_a_stall() -> None:
    watched = Watched()
    watched.wait(10)
    assert watched.changes == [True]


def test_a_loop_that_turns_without_a_step_while_there_is_work_is_a_stall() -> None:
    for work in ({"num_running": 1}, {"num_waiting": 1}):
        watched = Watched()
        for step_id in range(30):
            watched.beat(step_id=step_id, **work)
        assert watched.changes == []
        for _ in range(30):
            watched.beat(step_id=29, **work)
        assert watched.changes == [True]
        watched.beat(step_id=30, **work)
        assert watched.changes == [True, False]


def test_an_engine_that_ended_is_not_stalled_and_its_last_words_mean_nothing() -> None:
    watched = Watched()
    watched.beat()
    watched.wait(10)
    watched.watch.stop()
    watched.beat()
    watched.wait(100)
    assert watched.changes == [True]
    watched.watch.start()
    watched.beat()
    assert watched.changes == [True]


def test_the_age_of_the_last_progress_grows_while_a_busy_loop_computes_nothing() -> None:
    watched = Watched()
    watched.beat(step_id=5, num_running=1)
    assert watched.watch.age_s == 0
    watched.beat(step_id=5, num_running=1, after_s=3.0)
    assert watched.watch.age_s == 3
    watched.beat(step_id=6, num_running=1, after_s=20.0)
    assert watched.watch.age_s == 0
    watched.wait(2.0)
    watched.watch.stop()
    assert watched.watch.age_s == 0  # nothing is expected of an engine that is gone


def test_a_stall_that_does_not_end_is_a_hang_once() -> None:
    watched = Watched()
    watched.beat(after_s=0.0)
    watched.wait(10)
    assert (watched.changes, watched.hangs) == ([True], [])
    watched.wait(20)
    watched.wait(60)
    assert (watched.changes, watched.hangs) == ([True], [30.0])


def test_progress_and_an_end_put_a_hang_off() -> None:
    watched = Watched()
    watched.wait(15)
    watched.beat()
    watched.wait(15)
    assert watched.changes == [True, False, True]
    watched.watch.stop()
    watched.wait(100)
    assert watched.hangs == []


def test_a_load_may_be_silent_for_minutes_and_is_a_hang_after_that() -> None:
    watched = Watched()
    watched.watch.load()
    watched.wait(LOAD_STALL_AFTER_S - 1)
    assert watched.watch.age_s == 0  # of a loop, and there is none
    watched.watch.load()
    watched.wait(LOAD_STALL_AFTER_S - 1)
    assert (watched.changes, watched.hangs) == ([], [])
    watched.wait(1)
    watched.wait(0)
    assert (watched.changes, watched.hangs) == ([True], [watched.now_s])
    watched.watch.load()
    assert watched.changes == [True, False]
    watched.watch.start()
    watched.wait(10)
    assert watched.changes == [True, False, True]  # a loop again, with its own limit
