"""DiskTier: writes blocks of host memory to a disk, and brings them back for requests. Plain Python; never torch.

To the disk: a block that has reached host memory is queued to be written, unless the disk has it. Its slots stay until
that is done. What the disk cannot take is dropped.

From the disk: when a request could be admitted, begin() looks for a longer hit with all tiers together. If there is
one that is worth it, the missing blocks are read into slots, and the request waits; it holds no page meanwhile. When
they have arrived, or could not be read, it is considered again, and HostTier brings them to the pool. A block that
several requests wait for is read once. The loop never waits for the disk: poll() takes what is done, and lets requests
go on without their blocks when nothing arrives for STALL_S, or not all of theirs for LONGEST_WAIT_S. After a stall no
request waits until something has come back.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from engine.core.cache_layout import CacheLayout
from engine.core.host_index import HostBlock, HostIndex
from engine.core.kv_events import KvEvents, Medium, Name
from engine.core.prefix_hits import Blocks, Hit, PrefixFinder
from engine.core.request import Request
from engine.tiers.disk_state import DiskCounts, DiskStatus
from engine.tiers.store_threads import StoreThreads, Transfer

STALL_S = 5.0
LONGEST_WAIT_S = 60.0
_ON_DISK = -2  # in place of a block's number
_MOST_SLOTS = 2  # a request's blocks from the disk take at most one in so many slots of host memory


class DiskFacts(Protocol):
    """What a store tells of itself."""

    @property
    def counts(self) -> DiskCounts:
        """What it has done."""
        ...

    @property
    def status(self) -> DiskStatus:
        """What it has now. Does not wait."""
        ...

    def watch(self, group: int, key: bytes) -> bool:
        """Return whether the store has a block; if so, take_lost() tells when it has it no more."""
        ...

    def take_lost(self) -> list[Name]:
        """Return the watched blocks that it has no more; they are watched no longer. Does not wait."""
        ...


class DiskPins(Protocol):
    """A store's pinned blocks, which leave it after all others."""

    def pin(self, names: Sequence[Name], *, owner: str, for_s: float) -> None:
        """Pin blocks that are there, in the order of their prompt. Waits for the disk."""
        ...

    def pinned_for_s(self, group: int, key: bytes) -> float:
        """Return for how long a block is still pinned; 0: it is not. Does not wait."""
        ...


class HostPins(Protocol):
    """The pins of host memory, by name."""

    def find(self, name: Name) -> tuple[str, float] | None:
        """Return the owner of a block's pin and its end by the loop's clock, or None."""
        ...

    def keep(self, name: Name, *, owner: str, deadline_s: float) -> None:
        """Pin a block."""
        ...


@dataclass(frozen=True, kw_only=True)
class DiskParts:
    """What the tier works with."""

    threads: StoreThreads  # to a store of this cache's identity
    slot_memory: Callable[[int], memoryview]  # the bytes of a slot of host memory
    facts: DiskFacts  # of the store
    pins: DiskPins  # of the store


@dataclass(slots=True, eq=False)
class _Wait:
    """A request that waits for blocks."""

    began_s: float
    num_missing: int = 0


@dataclass(slots=True, eq=False)
class _Reading:
    """A block on its way into host memory."""

    transfer: Transfer
    slots: list[int]
    waiters: list[Request] = field(default_factory=list)


class AllTiers:
    """Finds blocks of faster tiers, and those of the disk as _ON_DISK."""

    def __init__(self, faster: Blocks, threads: StoreThreads) -> None:
        self._faster = faster
        self._threads = threads

    def find(self, group: int, key: bytes) -> int | None:
        """See Blocks.find."""
        block = self._faster.find(group, key)
        return _ON_DISK if block is None and self._threads.has(group, key) else block


class DiskTier:
    """Owns the requests that wait for the disk, and the slots of the blocks that are being read. O(1) per block."""

    def __init__(
        self,
        parts: DiskParts,
        layout: CacheLayout,
        index: HostIndex,
        *,
        faster: Blocks,
        storing: Container[Name],
        token_s: float,
        host_pins: HostPins | None = None,
    ) -> None:
        """faster: finds blocks of pool and host memory; storing: names of copies in flight to host memory.

        token_s: seconds to compute a prompt token; 0: unknown. host_pins: None: nothing is pinned.
        """
        self.waits: dict[Request, _Wait] = {}
        self.num_read = 0  # blocks
        self.num_failed = 0  # blocks that could not be read after all
        self.num_found_tokens = 0  # by which hits were longer
        self.num_written = 0
        self.num_unwritten = 0  # blocks that could not be written
        self.num_waits = 0  # admissions that waited
        self.num_too_costly = 0  # admissions: computing is quicker, or slots are lacking
        self.waited_s = 0.0  # over all requests
        self.events: KvEvents | None = None  # told of the blocks that this process knows on the disk
        self._parts = parts
        self._layout = layout
        self._index = index
        self._storing = storing
        self._token_s = token_s
        self._host_pins = host_pins
        self._with_disk = PrefixFinder(layout, AllTiers(faster, parts.threads))
        self._without = PrefixFinder(layout, faster)
        self._reading: dict[Name, _Reading] = {}
        self._writing: dict[Name, HostBlock] = {}
        self._last_read_s = 0.0
        self._is_stalled = False  # requests stopped waiting, and nothing has come back since

    def begin(self, request: Request, now: float) -> bool:
        """Let a request wait for blocks of the disk if its hit becomes longer by enough; return whether it waits.

        Once for each admission, so nothing can keep a request waiting for ever.
        """
        if request in self.waits:
            return True
        if request.has_asked_disk or self._is_stalled:
            return False
        request.has_asked_disk = True
        hit = self._with_disk.find(request)
        missing = [name for name, block in self._blocks(request, hit) if block == _ON_DISK]
        if not missing:
            return False
        num_before = self._without.find(request).num_tokens
        gain = hit.num_tokens - num_before
        num_pages = sum(self._layout.groups[name[0]].pages for name in missing if name not in self._reading)
        if gain <= 0 or not self._is_worth_reading(num_tokens=gain, num_pages=num_pages):
            self.num_too_costly += gain > 0
            return False
        for name, _ in self._blocks(request, hit):
            self._index.touch(name)  # what host memory has of the hit is not what makes room for the rest
        wait = _Wait(now)
        for name in missing:
            if not self._read(name, request):
                break
            wait.num_missing += 1
        if wait.num_missing:
            self.waits[request] = wait
            self.num_waits += 1
            request.found_before_disk, request.found_with_disk = num_before, hit.num_tokens
            self._describe(request, hit)
        return bool(wait.num_missing)

    def end_wait(self, request: Request, num_hit_tokens: int) -> int:
        """Return how many tokens of an admitted request's hit are owed to the disk. If preempted, it may ask again."""
        num_tokens = max(min(num_hit_tokens, request.found_with_disk) - request.found_before_disk, 0)
        request.has_asked_disk = False
        request.found_before_disk = request.found_with_disk = 0
        self.num_found_tokens += num_tokens
        return num_tokens

    def cancel(self, request: Request) -> None:
        """Let a request that ends wait no longer."""
        if self.waits.pop(request, None) is None:
            return
        for reading in self._reading.values():
            if request in reading.waiters:
                reading.waiters.remove(request)
                if not reading.waiters:
                    self._parts.threads.cancel(reading.transfer)

    def write(self, name: Name) -> None:
        """Queue a block that host memory has to be written, unless the disk has it. Does not wait."""
        threads, block = self._parts.threads, self._index.find(name)
        if block is None or name in self._writing:
            return
        if threads.has(*name):
            self._tell_kept(name)
            return
        transfer = threads.put(*name, self._memory(block.slots), slots=block.slots)
        if transfer is None:
            self.num_unwritten += 1
        else:
            self._index.begin_reading(block)
            self._writing[name] = block

    def pin(self, names: Sequence[Name], *, owner: str, for_s: float) -> None:
        """Pin the blocks of a prompt that the disk has; the others when they are written. Does not wait."""
        threads, pins = self._parts.threads, self._parts.pins
        there: list[Name] = []
        for name in names:
            if threads.has(*name):
                there.append(name)
            else:
                self.write(name)  # it may have been dropped
        if there:
            threads.call(partial(pins.pin, there, owner=owner, for_s=for_s), num_blocks=len(there))

    def forget(self, names: Iterable[Name]) -> None:
        """Let blocks no longer be found on the disk: their values are not finite, perhaps."""
        names = list(names)
        self._parts.threads.remove(names)
        if self.events is not None:
            for name in names:
                self.events.removed(Medium.DISK, name)

    def poll(self, now: float) -> None:
        """Take what the disk has done. Does not wait."""
        for transfer in self._parts.threads.take_done():
            self._is_stalled = False
            if transfer.is_read:
                self._end_read(transfer, now)
            else:
                name = (transfer.group, transfer.key)
                self._index.end_reading(self._writing.pop(name))
                if transfer.is_kept:
                    self._tell_kept(name)
                    self._pin_as_in_host(name, now)
                self.num_written += transfer.is_kept
                self.num_unwritten += not transfer.is_kept
        if self.events is not None:
            for name in self._parts.facts.take_lost():
                self.events.removed(Medium.DISK, name)
        stalled = [request for request, wait in self.waits.items() if now - wait.began_s > STALL_S]
        if stalled and now - self._last_read_s > STALL_S:
            self._is_stalled = True
        else:  # one read may hang while others end
            stalled = [request for request in stalled if now - self.waits[request].began_s > LONGEST_WAIT_S]
        for request in stalled:
            self.cancel(request)
        self._is_stalled &= bool(self._reading or self._writing)

    @property
    def facts(self) -> DiskFacts:
        """What the store tells."""
        return self._parts.facts

    @property
    def num_writing(self) -> int:
        """Blocks that wait to be written, or are being written."""
        return len(self._writing)

    @property
    def num_reading(self) -> int:
        """Blocks that wait to be read, or are being read."""
        return len(self._reading)

    @property
    def num_queued_bytes(self) -> int:
        """The bytes of the blocks that wait to be written, or are being written."""
        return self._parts.threads.num_queued_bytes

    @property
    def num_dropped(self) -> int:
        """Blocks that the queue to the disk had no room for."""
        return self._parts.threads.num_dropped

    @property
    def slots(self) -> list[int]:
        """The slots that are taken for blocks that are being read."""
        return [slot for reading in self._reading.values() for slot in reading.slots]

    def check(self) -> None:
        """Assert that requests wait for reads in flight alone, and that blocks that are written keep their slots."""
        waiting = [request for reading in self._reading.values() for request in reading.waiters]
        assert set(waiting) == set(self.waits)
        for request, wait in self.waits.items():
            assert waiting.count(request) == wait.num_missing > 0
        assert all(block.num_readers for block in self._writing.values())

    def _is_worth_reading(self, *, num_tokens: int, num_pages: int) -> bool:
        """Return whether there is room for these pages, and computing the tokens takes longer than reading them.

        They are read behind those that others wait for.
        """
        if num_pages * _MOST_SLOTS > self._index.num_ready:
            return False
        num_bytes = (num_pages + len(self.slots)) * self._parts.slot_memory(0).nbytes
        counts = self._parts.facts.counts
        if not self._token_s or not counts.read_bytes:
            return True
        return num_bytes * counts.read_s / counts.read_bytes < num_tokens * self._token_s

    def _read(self, name: Name, request: Request) -> bool:
        """Let a request wait for a block; return False if there are no slots for it."""
        reading = self._reading.get(name)
        if reading is not None and reading.transfer.is_cancelled:
            return False
        if reading is None:
            slots = self._index.take(self._layout.groups[name[0]].pages)
            if slots is None:
                return False
            transfer = self._parts.threads.get(*name, self._memory(slots), slots=slots)
            reading = self._reading[name] = _Reading(transfer, slots)
        reading.waiters.append(request)
        return True

    def _end_read(self, transfer: Transfer, now: float) -> None:
        name = (transfer.group, transfer.key)
        reading = self._reading.pop(name)
        self._last_read_s = now
        is_new = self._index.find(name) is None and name not in self._storing
        if transfer.is_kept:
            self._tell_kept(name)
            self._pin_in_host(name, reading.waiters, now)
        if transfer.is_kept and is_new:
            self._index.add(name, reading.slots)
        else:
            self._index.give_back(reading.slots)
        if self.events is not None:
            self.events.forget(name)  # if it was lost
        self.num_read += transfer.is_kept
        self.num_failed += not transfer.is_kept
        for request in reading.waiters:
            wait = self.waits[request]
            wait.num_missing -= 1
            if not wait.num_missing:
                del self.waits[request]
                self.waited_s += now - wait.began_s

    def _blocks(self, request: Request, hit: Hit) -> Iterable[tuple[Name, int]]:
        """Yield name and number of the blocks of a hit."""
        for group, blocks in zip(self._layout.groups, hit.blocks, strict=True):
            last = hit.num_tokens // group.tokens
            for column, block in enumerate(blocks, last - len(blocks)):
                yield (group.index, request.block_hashes[(column + 1) * group.links - 1]), block

    def _describe(self, request: Request, hit: Hit) -> None:
        """Describe the blocks of a hit that are being read: this process may not know their tokens."""
        if self.events is None:
            return
        for group, blocks in zip(self._layout.groups, hit.blocks, strict=True):
            end = hit.num_tokens // group.tokens
            for column, block in enumerate(blocks, end - len(blocks)):
                name = (group.index, request.block_hashes[(column + 1) * group.links - 1])
                if block == _ON_DISK and name in self._reading:
                    self.events.describe(request, group, (column,))

    def _pin_as_in_host(self, name: Name, now: float) -> None:
        """Pin a block that was written, if host memory has it pinned."""
        found = None if self._host_pins is None else self._host_pins.find(name)
        if found is not None and found[1] > now:
            self.pin([name], owner=found[0], for_s=found[1] - now)

    def _pin_in_host(self, name: Name, waiters: Sequence[Request], now: float) -> None:
        """Let a block that was read, perhaps of an earlier process, keep its pin in host memory.

        Only requests of its owner can ask for it: the key is in the root of their chains of hashes.
        """
        if self._host_pins is not None and waiters:
            for_s = self._parts.pins.pinned_for_s(*name)
            if for_s > 0:
                self._host_pins.keep(name, owner=waiters[0].open_salt, deadline_s=now + for_s)

    def _tell_kept(self, name: Name) -> None:
        if self.events is not None and self._parts.facts.watch(*name):
            self.events.stored(Medium.DISK, name)

    def _memory(self, slots: list[int]) -> list[memoryview]:
        return [self._parts.slot_memory(slot) for slot in slots]
