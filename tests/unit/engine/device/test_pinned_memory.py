"""Host memory that is pinned piece by piece. What pins is a fake: only CUDA can."""

import threading
from collections.abc import Callable

import pytest
import torch

from engine.device import pinned_memory
from engine.device.memory import zeros
from engine.device.pinned_memory import PinnedMemory

CPU = torch.device("cpu")
Held = list[tuple[int, int]]


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Held:
    """(address, bytes) of what is pinned now."""
    held: Held = []
    monkeypatch.setattr(pinned_memory, "PIECE_BYTES", 3 * 4096)
    monkeypatch.setattr(pinned_memory, "FIRST_BYTES", 3 * 4096)
    monkeypatch.setattr(pinned_memory, "pin", lambda piece: held.append((piece.data_ptr(), piece.nbytes)))
    monkeypatch.setattr(pinned_memory, "unpin", lambda piece: held.remove((piece.data_ptr(), piece.nbytes)))
    return held


def make(num_rows: int = 10, row_bytes: int = 4096) -> tuple[torch.Tensor, PinnedMemory]:
    memory = zeros((num_rows, row_bytes), torch.uint8, CPU)
    return memory, PinnedMemory(memory, CPU)


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come in 10 s")


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "rows_of_a_piece"), [(10, 4096, 3), (7, 8192, 1), (100, 1536, 8), (5, 24, 512)]
)
def test_the_first_pieces_at_once_the_rest_when_asked_and_no_two_share_a_page(
    pins: Held, num_rows: int, row_bytes: int, rows_of_a_piece: int
) -> None:
    memory, pinned = make(num_rows, row_bytes)
    num_first = -(-3 * 4096 // (rows_of_a_piece * row_bytes)) * rows_of_a_piece
    assert pinned.num_ready == min(num_rows, num_first)
    assert sum(size for _, size in pins) == pinned.num_ready * row_bytes
    told: list[int] = []
    pinned.pin_rest(lambda: told.append(pinned.num_ready))
    pinned.await_all()
    assert pinned.num_ready == num_rows
    assert not pinned.is_growing
    assert told == sorted(told)
    assert told[-1] == num_rows
    assert sum(size for _, size in pins) == memory.nbytes
    assert all(address % 4096 == 0 for address, _ in pins)
    pinned.close()
    assert pins == []


def test_a_row_is_ready_only_after_its_piece_is_pinned(pins: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    _, pinned = make()
    begun, goes_on = threading.Event(), threading.Event()

    def wait(piece: torch.Tensor) -> None:
        begun.set()
        goes_on.wait(10)
        pins.append((piece.data_ptr(), piece.nbytes))

    monkeypatch.setattr(pinned_memory, "pin", wait)
    pinned.pin_rest()
    assert begun.wait(10)
    assert pinned.num_ready == 3
    assert pinned.is_growing
    threading.Timer(0.05, goes_on.set).start()
    pinned.close()  # waits for the piece, which it unpins
    assert pins == []
    assert not pinned.is_growing


def test_it_rests_beside_steps(pins: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    _, pinned = make()
    monkeypatch.setattr(pinned_memory, "_IDLE_S", 1000.0)
    monkeypatch.setattr(pinned_memory, "REST", 1e9)
    pinned.note_step()
    pinned.pin_rest()
    wait_for(lambda: pinned.num_ready == 6)
    assert not pinned._ends.wait(0.05)
    assert pinned.num_ready == 6
    pinned.close()
    assert pins == []


def test_runs_end_where_pieces_do(pins: Held) -> None:
    _, pinned = make()
    assert list(pinned.runs([1, 2, 3, 4, 5, 6, 9, 8])) == [(0, 1, 2), (2, 3, 3), (5, 6, 1), (6, 9, 1), (7, 8, 1)]
    pinned.close()


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_pin_that_fails_is_told_once_and_what_is_pinned_stays(
    pins: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_before: int
) -> None:
    def refuse(piece: torch.Tensor) -> None:
        if len(pins) == num_before:
            raise RuntimeError("out of memory\nmore")
        pins.append((piece.data_ptr(), piece.nbytes))

    monkeypatch.setattr(pinned_memory, "pin", refuse)
    _, pinned = make()
    pinned.pin_rest()
    pinned.await_all()
    (record,) = caplog.records
    assert f"pinned='{f'{12 * num_before} KiB' if num_before else '0 bytes'}'" in record.getMessage()
    assert "of='40 KiB' reason='out of memory'" in record.getMessage()
    assert "ulimit_l=" in record.getMessage()
    assert (pinned.num_ready, pinned.is_growing) == (3 * num_before, False)
    pinned.close()
    assert pins == []


def test_memory_that_others_need_is_not_pinned(
    pins: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, pinned = make()
    monkeypatch.setattr(pinned_memory, "free_host_bytes", lambda: 2**29)
    pinned.pin_rest()
    pinned.await_all()
    (record,) = caplog.records
    assert "are free" in record.getMessage()
    assert "free='512 MiB'" in record.getMessage()
    assert pinned.num_ready == 3
    pinned.close()
