"""Slots that all ranks have ready: each rank pins host memory of its own, at its own pace. Never torch.

    first rank:   LoadedEngine.pin_host_memory → PinSlots to each other rank … its SlotsReady → RankedSlots
    other ranks:  run_plans → PinnedMemory.pin_rest → SlotsReady, now and after each piece

A plan's slots are the same on all ranks, so a slot is ready once the slowest rank has it.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from engine.core.host_copies import SlotSource


class PinSlots(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to pin the rest of its slots, and to tell its progress."""


class SlotsReady(msgspec.Struct, frozen=True, tag=True):
    """Tells how far a rank is."""

    num_ready: int
    is_growing: bool


class Pinning(SlotSource, Protocol):
    """A rank's memory, which pins itself: engine/device/pinned_memory.py."""

    def pin_rest(self, on_progress: Callable[[], None]) -> None:
        """Start to pin what is left. Does not block. on_progress: called in a thread, now and after each piece."""
        ...


def slots_ready(slots: SlotSource) -> SlotsReady:
    """Return what a rank has ready now."""
    is_growing = slots.is_growing  # read before the number: it may be the last one
    return SlotsReady(slots.num_ready, is_growing)


class RankedSlots:
    """SlotSource of all ranks. The first rank's loop reads it, and the threads that listen to the others write it."""

    def __init__(self, own: SlotSource, ranks: Iterable[int]) -> None:
        """own: the first rank's. ranks: the others, which have nothing ready until they tell."""
        self._own = own
        self._others = dict.fromkeys(ranks, SlotsReady(0, True))

    @property
    def num_ready(self) -> int:
        """See SlotSource.num_ready."""
        return min(self._own.num_ready, *(told.num_ready for told in self._others.values()))

    @property
    def is_growing(self) -> bool:
        """See SlotSource.is_growing. True until every rank has ended, though one that ended early bounds the others."""
        return self._own.is_growing or any(told.is_growing for told in self._others.values())

    def take(self, rank: int, told: SlotsReady) -> None:
        """Note what a rank tells; called in the thread that listens to it."""
        self._others[rank] = told
