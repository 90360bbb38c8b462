"""PinnedMemory: host memory that CUDA has pinned, piece by piece, the most of it after the start. Imports torch.

Copies from and to memory that is not pinned block the step, so rows are used only once they are pinned: the first
num_ready of them. A thread pins: a few pieces at once, in order to measure copies; the others after pin_rest(). While
it pins a piece the driver may keep launches waiting. So beside steps and late captures it rests after each piece, for a
multiple of the time that the piece took; an engine without them has the next piece at once.

Pinning ends early if the driver refuses a piece, or if the machine, or this cgroup, has too little memory left. What is
pinned by then stays in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import resource
import threading
import time
from collections.abc import Callable, Iterator

import torch

from engine.device.memory import format_size, free_host_bytes
from engine.interface.units import GIB, MIB

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 * MIB
FIRST_BYTES = 32 * MIB  # before pin_rest()
# Beside steps the thread rests so many times as long as a piece took: it may stop launches for 1/33 of the time at most
REST = 32.0
_IDLE_S = 0.05  # without a step for so long, it does not rest
_LEFT_BYTES = GIB // 2  # of free memory, what is left to others
# Of madvise. Pages of 2 MiB are made and pinned 2.5 times as fast (benchmarks/pinning.py)
_HUGE_PAGE, _POPULATE_WRITE = 14, 23  # the second one from Linux 5.14 on


class PinnedMemory:
    """Pins a tensor's rows, in order. Life: made, which pins the first → pin_rest() → close()."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        """memory: [rows, ...], beginning at a page of the system. Waits for the first pieces alone."""
        row_bytes = memory.nbytes // len(memory)
        whole_pages = mmap.PAGESIZE // math.gcd(row_bytes, mmap.PAGESIZE)  # rows; two pieces may not share a page
        self._rows_of_piece = max(PIECE_BYTES // row_bytes // whole_pages, 1) * whole_pages
        self._pieces = memory.split(self._rows_of_piece)
        self._num_first = min(-(-FIRST_BYTES // (self._rows_of_piece * row_bytes)), len(self._pieces))
        self._device = device if device.index is not None or device.type != "cuda" else _current_device()
        self._num_bytes = memory.nbytes
        self._num_pinned = 0  # pieces
        self._num_ready = 0
        self._is_growing = True
        self._stepped_s = -math.inf
        self._on_progress: Callable[[], None] = lambda: None
        self._has_first, self._goes_on, self._ends = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._pin_all, name="pin-host-memory", daemon=True)
        self._thread.start()
        self._has_first.wait()

    @property
    def num_ready(self) -> int:
        """See SlotSource.num_ready."""
        return self._num_ready

    @property
    def is_growing(self) -> bool:
        """See SlotSource.is_growing."""
        return self._is_growing

    def pin_rest(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Start to pin the other pieces. Does not block. on_progress: called in a thread, now and after each piece."""
        self._on_progress = on_progress
        on_progress()
        self._goes_on.set()

    def await_all(self) -> None:
        """Wait until nothing more will be pinned; after pin_rest()."""
        self._thread.join()

    def note_step(self) -> None:
        """Let the thread rest beside a step that is launched now, or a graph that is captured."""
        self._stepped_s = time.monotonic()

    def runs(self, rows: list[int]) -> Iterator[tuple[int, int, int]]:
        """Yield place, first row and length of each run of neighbours within a piece: one copy takes no more."""
        start = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or rows[end] != rows[end - 1] + 1 or rows[end] % self._rows_of_piece == 0:
                yield start, rows[start], end - start
                start = end

    def end(self) -> None:
        """Pin no more. Waits for the piece that is being pinned."""
        self._ends.set()
        self._goes_on.set()
        self._thread.join()

    def close(self) -> None:
        """Unpin everything, when no copy is in flight."""
        self.end()
        for piece in self._pieces[: self._num_pinned]:
            unpin(piece)
        self._num_pinned = 0

    def _pin_all(self) -> None:
        """Pin all pieces; runs in a thread."""
        started_s = time.monotonic()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # with its index, else of the context of another device
            for number, piece in enumerate(self._pieces):
                if number == self._num_first:
                    self._has_first.set()
                    self._goes_on.wait()
                    started_s = time.monotonic()
                if self._ends.is_set():
                    return
                piece_s = self._pin(piece)
                self._on_progress()
                if number >= self._num_first and time.monotonic() - self._stepped_s < _IDLE_S:
                    self._ends.wait(REST * piece_s)
            self._has_first.set()
            self._goes_on.wait()
            logger.info(
                "host memory pinned size=%r seconds=%.1f", format_size(self._num_bytes), time.monotonic() - started_s
            )
        except (RuntimeError, OSError) as error:
            soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            logger.warning(
                "host memory cannot all be pinned, and the rest of --kv-host-memory is not used pinned=%r of=%r"
                " reason=%r free=%r ulimit_l=%r",
                format_size(sum(piece.nbytes for piece in self._pieces[: self._num_pinned])),
                format_size(self._num_bytes),
                str(error).partition("\n")[0],
                format_size(free_host_bytes()),
                "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft),
            )
        finally:
            self._is_growing = False
            self._has_first.set()
            self._on_progress()

    def _pin(self, piece: torch.Tensor) -> float:
        """Pin a piece; return the seconds that this took."""
        if free_host_bytes() < piece.nbytes + _LEFT_BYTES:
            raise OSError(f"less than {format_size(piece.nbytes + _LEFT_BYTES)} of memory are free")
        began_s = time.monotonic()
        populate(piece)
        pin(piece)
        self._num_pinned += 1
        self._num_ready += len(piece)
        return time.monotonic() - began_s


def pin(piece: torch.Tensor) -> None:
    """Pin memory that begins at a page. Raises RuntimeError. torch would round its size up to a power of 2."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))


def unpin(piece: torch.Tensor) -> None:
    """Undo pin(). Memory that is freed while it is pinned could never be pinned again at its address."""
    torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def populate(piece: torch.Tensor) -> None:
    """Have the system make the pages, without the driver: in it, making them would block launches for all that time."""
    start = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = piece.data_ptr() + piece.nbytes - start
    with contextlib.suppress(AttributeError, OSError):
        for advice in (_HUGE_PAGE, _POPULATE_WRITE):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
