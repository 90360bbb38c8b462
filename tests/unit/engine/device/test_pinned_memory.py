"""Host memory that is pinned piece by piece. What pins is a fake: only CUDA can."""

import threading

import pytest
import torch

from engine.device import pinned_memory
from engine.device.memory import zeros
from engine.device.pinned_memory import PinnedMemory

CPU = torch.device("cpu")


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(address, bytes) of what is pinned now."""
    held: list[tuple[int, int]] = []
    monkeypatch.setattr(pinned_memory, "PIECE_BYTES", 3 * 4096)
    monkeypatch.setattr(pinned_memory, "pin", lambda piece: held.append((piece.data_ptr(), piece.nbytes)))
    monkeypatch.setattr(pinned_memory, "unpin", lambda piece: held.remove((piece.data_ptr(), piece.nbytes)))
    return held


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "rows_of_a_piece"), [(10, 4096, 3), (7, 8192, 1), (100, 1536, 8), (5, 24, 512)]
)
def test_the_first_piece_at_once_the_rest_by_a_thread_and_no_two_share_a_page(
    pins: list[tuple[int, int]], num_rows: int, row_bytes: int, rows_of_a_piece: int
) -> None:
    memory = zeros((num_rows, row_bytes), torch.uint8, CPU)
    pinned = PinnedMemory(memory, CPU)
    first = min(num_rows, rows_of_a_piece) * row_bytes
    assert pins == [(memory.data_ptr(), first)]
    memory.fill_(7)
    pinned.pin_rest()
    pinned.pin_rest()
    for thread in pinned._threads:
        thread.join()
    assert sum(size for _, size in pins) == memory.nbytes
    assert all(address % 4096 == 0 for address, _ in pins)
    assert bool((memory == 7).all())
    pinned.close()
    assert pins == []


def test_runs_end_where_pieces_do(pins: list[tuple[int, int]]) -> None:
    pinned = PinnedMemory(zeros((10, 4096), torch.uint8, CPU), CPU)
    assert list(pinned.runs([1, 2, 3, 4, 5, 6, 9, 8])) == [(0, 1, 2), (2, 3, 3), (5, 6, 1), (6, 9, 1), (7, 8, 1)]
    whole = PinnedMemory(zeros((10, 4096), torch.uint8, CPU), CPU, is_whole=True)
    assert list(whole.runs([1, 2, 3, 4])) == [(0, 1, 4)]


def test_what_cannot_be_pinned_is_told_and_the_rest_stays(
    pins: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = zeros((10, 4096), torch.uint8, CPU)
    pinned = PinnedMemory(memory, CPU)

    def refuse(piece: torch.Tensor) -> None:
        if len(pins) == 2:
            raise RuntimeError("out of memory\nmore")
        pins.append((piece.data_ptr(), piece.nbytes))

    monkeypatch.setattr(pinned_memory, "pin", refuse)
    pinned.pin_rest()
    pinned._threads[0].join()
    (record,) = caplog.records
    assert "size='24 KiB' of='40 KiB' reason='out of memory'" in record.getMessage()
    pinned.close()
    assert pins == []


def test_its_end_waits_for_the_piece_that_is_being_pinned(
    pins: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = PinnedMemory(zeros((10, 4096), torch.uint8, CPU), CPU)
    begun, goes_on = threading.Event(), threading.Event()

    def wait(piece: torch.Tensor) -> None:
        begun.set()
        goes_on.wait(10)
        pins.append((piece.data_ptr(), piece.nbytes))

    monkeypatch.setattr(pinned_memory, "pin", wait)
    pinned.pin_rest()
    assert begun.wait(10)
    threading.Timer(0.1, goes_on.set).start()
    pinned.close()
    assert pins == []
    assert not pinned._threads[0].is_alive()
