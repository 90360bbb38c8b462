"""HostCopies: the copies of a step between pool and host memory, and the requests that wait for them. Never torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.core.host_index import HostBlock
from engine.core.kv_events import Name
from engine.core.request import Request


class SlotSource(Protocol):
    """Knows which slots of host memory can be used; engine/device/pinned_memory.py pins them."""

    @property
    def num_ready(self) -> int:
        """The first slots that can be used, on all ranks. Never fewer than before; does not wait."""
        ...

    @property
    def is_growing(self) -> bool:
        """False if num_ready, when it is read afterwards, is the last one."""
        ...


class Store(NamedTuple):
    """A block that a step copies to the host."""

    name: Name
    block: int
    slots: list[int]


@dataclass(slots=True, eq=False)
class Arrival:
    """A block that is copied from the host, and the requests that wait for it."""

    source: HostBlock
    block: int
    waiters: list["Gate"]
    is_planned: bool = False


@dataclass(slots=True, eq=False)
class Gate:
    """A request that waits for blocks."""

    request: Request
    began_s: float
    held: list[int]  # what the hit consists of, group after group
    arrivals: list[Arrival] = field(default_factory=list)
    num_missing: int = 0  # arrivals that are not committed


@dataclass(slots=True)
class HostCopies:
    """The copies of a step."""

    to_host: list[tuple[int, int]] = field(default_factory=list)  # (page, slot)
    from_host: list[tuple[int, int]] = field(default_factory=list)  # (slot, page)
    stores: list[Store] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def blocks(self) -> Iterator[int]:
        """The blocks that the step holds until its commit."""
        for store in self.stores:
            yield store.block
        for arrival in self.arrivals:
            yield arrival.block
