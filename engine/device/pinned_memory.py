"""PinnedMemory: host memory that is pinned piece by piece, beside the start and the first steps. Imports torch.

Pinning a GiB takes some tenths of a second, in which the system also makes its pages. So only the first piece is pinned
at once. A thread goes on with the others, in order; between two it leaves the driver to those who launch steps. A copy
from or to memory that is not pinned yet is right, but blocks.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import time
import weakref
from collections.abc import Iterator

import torch

from engine.device.memory import format_size, zeros

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 * 2**20
_PAUSE_S = 0.002
_POPULATE_WRITE = 23  # of madvise, from Linux 5.14 on


class PinnedMemory:
    """Pins a tensor's rows, [rows, ...], for one device. Life: __init__ → pin_rest → close."""

    def __init__(self, memory: torch.Tensor, device: torch.device, *, is_whole: bool = False) -> None:
        """Pin the first piece, or everything (is_whole). memory begins at a page of the system.

        Raises RuntimeError if it cannot be pinned.
        """
        row_bytes = memory.nbytes // len(memory)
        whole_pages = mmap.PAGESIZE // math.gcd(row_bytes, mmap.PAGESIZE)  # rows; two pieces may not share a page
        self._rows = len(memory) if is_whole else max(PIECE_BYTES // row_bytes // whole_pages, 1) * whole_pages
        first, *self._left = memory.split(self._rows)
        self._device = device
        self._pinned = [first]
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        pin(first)
        # Memory that is freed while it is pinned could never be pinned again at its address
        self._unpin = weakref.finalize(self, _unpin_all, self._pinned, self._threads, self._ends)

    def pin_rest(self) -> None:
        """Start to pin the other pieces. Does not block."""
        if self._left and not self._threads:
            arguments = (self._left, self._pinned, self._device, self._ends)
            self._threads.append(threading.Thread(target=_pin_all, args=arguments, name="pin-host-memory", daemon=True))
            self._threads[0].start()

    def runs(self, rows: list[int]) -> Iterator[tuple[int, int, int]]:
        """Yield place, first row and length of each run of neighbours within a piece: one copy takes no more."""
        start = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or rows[end] != rows[end - 1] + 1 or rows[end] % self._rows == 0:
                yield start, rows[start], end - start
                start = end

    def close(self) -> None:
        """Unpin everything, when no copy is in flight. Waits for the piece that is being pinned."""
        self._unpin()


def can_pin() -> bool:
    """Return True if this system lets CUDA pin memory."""
    page = zeros((mmap.PAGESIZE,), torch.uint8, torch.device("cpu"))
    try:
        pin(page)
    except RuntimeError:
        return False
    unpin(page)
    return True


def pin(piece: torch.Tensor) -> None:
    """Pin memory, so that copies need not wait. torch's own pinned memory is rounded up to a power of 2."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))


def unpin(piece: torch.Tensor) -> None:
    """Undo pin()."""
    torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def _pin_all(left: list[torch.Tensor], pinned: list[torch.Tensor], device: torch.device, ends: threading.Event) -> None:
    """Pin all pieces that are left; runs in a thread."""
    started_s = time.monotonic()
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # else this thread would make a context on the first one
        for piece in left:
            if ends.is_set():
                return
            _populate(piece)
            pin(piece)
            pinned.append(piece)
            time.sleep(_PAUSE_S)
    except RuntimeError as error:
        missing = left[len(pinned) - 1 :]
        logger.warning(
            "host memory is not all pinned, so copies of the rest block steps size=%r of=%r reason=%r",
            format_size(sum(each.nbytes for each in pinned)),
            format_size(sum(each.nbytes for each in (*pinned, *missing))),
            str(error).partition("\n")[0],
        )
        return
    size = format_size(sum(each.nbytes for each in pinned))
    logger.info("host memory pinned size=%r seconds=%.1f", size, time.monotonic() - started_s)


def _populate(piece: torch.Tensor) -> None:
    """Have the system make the pages, without the driver; where it cannot, pinning does.

    Copies may write them meanwhile, so this thread must not write what it has read.
    """
    start = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = piece.data_ptr() + piece.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)


def _unpin_all(pinned: list[torch.Tensor], threads: list[threading.Thread], ends: threading.Event) -> None:
    ends.set()
    for thread in threads:
        thread.join()
    for piece in pinned:
        unpin(piece)
    pinned.clear()
