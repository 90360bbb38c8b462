"""HostPages: host memory behind the KV pool, and the copies of pages to it and back. Imports torch.

A slot has the bytes of one page, of this rank: [num_lanes, bytes of a lane's row]. On CUDA the slots are pinned, the
first ones at once and the others perhaps after the start (engine/device/pinned_memory.py): copies name those alone that
are. Copies run on a stream of their own beside the layers of the step: from the end of the work launched before them
until join(), after which the step's own work, and so its commit, waits for them. A page is a row of every lane, so
pages are first gathered into a buffer on the device, then sent as one piece for each run of neighbouring slots. On
other devices copies end within begin().
"""

from __future__ import annotations

import time
import weakref

import numpy as np
import torch

from engine.core.step import StepPlan
from engine.device.device_state import Staging
from engine.device.kv_cache import KVPool
from engine.device.memory import format_size, zeros
from engine.device.pinned_memory import FIRST_BYTES, PinnedMemory
from engine.interface.errors import StartupError
from engine.peers.shared_memory import SharedSlots

BUFFER_BYTES = 64 * 2**20  # on CUDA: pages that are gathered at once, at least one
_MEASURED_BYTES = FIRST_BYTES  # of memory that is pinned at once

Pairs = list[tuple[int, int]]


class HostPages:
    """Owns the slots of one rank. Life: begin(plan) → join(), in each step with copies → close()."""

    def __init__(
        self,
        pool: KVPool,
        *,
        num_slots: int,
        device: torch.device,
        is_shared: bool = False,
        pins_later: bool = False,
    ) -> None:
        """is_shared: other processes can map the memory. Raises StartupError if it cannot be allocated.

        pins_later: most slots are pinned after pins.pin_rest(), beside steps; else all before this returns.
        """
        numbers = pool.rows.view(torch.uint8)
        if numbers.shape[2] % 4 == 0:
            numbers = numbers.view(torch.int32)  # bits, whatever they mean: fewer to gather
        self._pages = numbers.transpose(0, 1)  # [num_pages, num_lanes, numbers in a row]
        self._device = device
        shape = (num_slots, numbers.shape[0], numbers.shape[2])
        page_bytes = shape[1] * shape[2] * numbers.itemsize
        try:
            self.shared = SharedSlots(num_slots=num_slots, slot_bytes=page_bytes) if is_shared else None
            if self.shared is None:
                self._slots = zeros(shape, numbers.dtype, torch.device("cpu"))
            else:
                self._slots = torch.from_numpy(self.shared.array).view(numbers.dtype).view(shape)
        except (RuntimeError, OSError, OverflowError) as error:
            raise StartupError(
                f"Host memory of {format_size(num_slots * page_bytes)} for the KV cache cannot be allocated: use a"
                " smaller --kv-host-memory, or off."
            ) from error
        self.page_bytes = page_bytes
        self.pins: PinnedMemory | None = None
        self._stream: torch.cuda.Stream | None = None
        self._in_use: list[torch.Tensor] = []  # numbers of pages, until the copies are joined
        if device.type == "cuda":
            self.pins = PinnedMemory(self._slots, device)
            self._unpin = weakref.finalize(self, self.pins.close)  # before the memory is freed
            self._unpin.atexit = False  # it takes its time, and the process's end does the same
            weakref.finalize(self, self.pins.end)
            if not pins_later:
                self.pins.pin_rest()
                self.pins.await_all()
            self._stream = torch.cuda.Stream(device)
            self._buffer = torch.empty(
                (max(BUFFER_BYTES // page_bytes, 1), *shape[1:]), dtype=numbers.dtype, device=device
            )

    def close(self) -> None:
        """Release the memory, when no copy is in flight."""
        if self._stream is not None:
            self._stream.synchronize()
            self._unpin()
        del self._slots
        if self.shared is not None:
            self.shared.close()

    def begin(self, plan: StepPlan, staging: Staging) -> None:
        """Launch a step's copies, behind all that was launched before. On CUDA it does not block."""
        self._copy(plan.copies_to_host, plan.copies_from_host, staging)

    def join(self) -> None:
        """Let what is launched from now on wait for the copies. Does not block."""
        if self._in_use and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._in_use = []  # their memory is reused by this stream only from here on

    def slot_memory(self, slot: int) -> memoryview:
        """Return a slot's bytes, which change with it. They are the caller's while no copy reads or writes the slot."""
        return self._slots[slot].view(torch.uint8).view(-1).numpy().data

    def measure_page_s(self, staging: Staging) -> float:
        """Return the seconds in which a page comes from the host; 0 if no slot could be pinned.

        Overwrites slots and page 0; blocks and syncs.
        """
        num_slots = self._slots.shape[0] if self.pins is None else self.pins.num_ready
        count = min(max(_MEASURED_BYTES // self.page_bytes, 1), num_slots, self._pages.shape[0])
        if not count:
            return 0.0
        pairs = [(slot, 0) for slot in range(count)]
        self._copy([(0, slot) for slot, _ in pairs], pairs, staging)  # memory and kernels may not exist before
        self._wait()
        started = time.perf_counter()
        self._copy([], pairs, staging)
        self._wait()
        return (time.perf_counter() - started) / count

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self.join()

    def _copy(self, to_host: Pairs, from_host: Pairs, staging: Staging) -> None:
        if self._stream is None or self.pins is None:
            for page, slot in to_host:
                self._slots[slot].copy_(self._pages[page])
            for slot, page in from_host:
                self._pages[page].copy_(self._slots[slot])
            return
        num_at_once = self._buffer.shape[0]
        pages = [page for page, _ in to_host] + [page for _, page in from_host]
        where = staging.send_large(np.array(pages, dtype=np.int64))
        self._in_use.append(where)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for first in range(0, len(to_host), num_at_once):
                slots = [slot for _, slot in to_host[first : first + num_at_once]]
                gathered = self._buffer[: len(slots)]
                torch.index_select(self._pages, 0, where[first : first + len(slots)], out=gathered)
                for place, slot, count in self.pins.runs(slots):
                    self._slots[slot : slot + count].copy_(gathered[place : place + count], non_blocking=True)
            for first in range(0, len(from_host), num_at_once):
                slots = [slot for slot, _ in from_host[first : first + num_at_once]]
                gathered = self._buffer[: len(slots)]
                for place, slot, count in self.pins.runs(slots):
                    gathered[place : place + count].copy_(self._slots[slot : slot + count], non_blocking=True)
                targets = where[len(to_host) + first :][: len(slots)]
                self._pages.index_copy_(0, targets, gathered)
