"""Work in a thread of its own takes turns with its caller."""

import threading

import pytest

from engine.device.side_thread import SideThread


def test_work_and_caller_take_turns() -> None:
    order: list[str] = []

    def work() -> None:
        for turn in range(3):
            order.append(f"work {turn}")
            thread.pause()
        order.append("end")

    thread = SideThread(work, name="side")
    assert order == []
    for turn in range(3):
        assert not thread.resume()
        order.append(f"caller {turn}")
    assert thread.resume()
    assert order == ["work 0", "caller 0", "work 1", "caller 1", "work 2", "caller 2", "end"]


def test_an_error_of_the_work_is_the_callers() -> None:
    def work() -> None:
        thread.pause()
        raise ValueError("wrong")

    thread = SideThread(work, name="side")
    assert not thread.resume()
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            thread.resume()


@pytest.mark.parametrize("num_resumed", [0, 1, 2])
def test_stopped_work_ends_where_it_paused(num_resumed: int) -> None:
    done: list[str] = []

    def work() -> None:
        try:
            for turn in range(3):
                done.append(str(turn))
                thread.pause()
        finally:
            done.append("left")

    thread = SideThread(work, name="side")
    for _ in range(num_resumed):
        thread.resume()
    thread.stop()
    assert done == [str(turn) for turn in range(num_resumed)] + ["left"] * (num_resumed > 0)
    assert not any(other.name == "side" for other in threading.enumerate())
    assert thread.resume(), "it has ended"


def test_stopped_work_cannot_pause_again() -> None:
    done: list[str] = []

    def work() -> None:
        try:
            thread.pause()
        finally:
            try:
                thread.pause()
            finally:
                done.append("left")

    thread = SideThread(work, name="side")
    assert not thread.resume()
    stopping = threading.Thread(target=thread.stop, daemon=True)  # in a thread, as it would wait without end
    stopping.start()
    stopping.join(10.0)
    assert not stopping.is_alive()
    assert done == ["left"]
