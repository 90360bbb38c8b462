"""A first start that stands still is told, as often as it lasts, and is not ended; on a clock of the tests' own."""

import pytest

from engine.interface.control import Stage
from server.launcher.engine_health import LoadWatchdog
from tests.unit.server.launcher.test_step_watchdog import Clock


class Started:
    """A start that is watched with a limit of 300 s, and what the log says of it."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.clock = Clock()
        self._caplog = caplog
        self.watch = LoadWatchdog(call_later=self.clock.call_later, clock=lambda: self.clock.now_s)
        self.see("imports")

    def see(self, name: str, done: int = 0, *, after_s: float = 0.0) -> None:
        self.clock.wait(after_s)
        self.watch.see(Stage(name, done, 1000 if done else 0, unit="bytes", detail="Llama"))

    def said(self, *, after_s: float = 0.0) -> list[str]:
        """What is said in the next seconds."""
        self._caplog.clear()
        self.clock.wait(after_s)
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def started(caplog: pytest.LogCaptureFixture) -> Started:
    return Started(caplog)


def test_a_start_that_moves_may_take_for_ever(started: Started) -> None:
    for done in range(1, 100):
        started.see("weights", done, after_s=299.0)
    assert started.said() == []


def test_one_that_stands_still_is_told_with_its_stage_again_and_again(started: Started) -> None:
    started.see("weights", 500)
    started.see("weights", 500, after_s=200.0)  # says nothing new
    message = (
        "the start makes no progress after_s={} stage=weights done=500 total=1000 unit=bytes"
        ' detail="Llama"; the daemon keeps waiting'
    )
    assert started.said(after_s=99.0) == []
    assert started.said(after_s=1.0) == [message.format(300)]
    assert started.said(after_s=299.0) == []
    assert started.said(after_s=1.0) == [message.format(600)]


def test_an_engine_that_never_says_a_word_is_told_too(started: Started) -> None:
    assert "stage=imports" in started.said(after_s=300.0)[0]


def test_when_it_goes_on_that_is_told_once(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    started.said(after_s=310.0)
    caplog.clear()
    started.see("weights", 1, after_s=10.0)
    started.see("weights", 2)
    (record,) = caplog.records
    assert record.getMessage().startswith("the start continues after_s=320 stage=weights done=1 total=1000")


def test_nothing_more_is_expected_of_one_that_is_ready(started: Started) -> None:
    started.see("ready")
    assert started.said(after_s=10_000.0) == []
