"""Arrivals: takes the blocks of prompts that prefill engines computed. Plain Python; never torch.

The decode engine's side of a hand-over (docs/explanation/disaggregation.md). Offered blocks are copied into slots of
its own host memory as they come, before it knows their request. The request follows with its first token. It waits
until all offers of its prompt have been copied, then host memory and pool go on as with any blocks (HostTier), and what
is missing is computed.

Nothing waits for ever: a request goes on without its blocks when the prefill engine is lost, when nothing comes for
STALL_S, or not all for LONGEST_WAIT_S.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.core.cache_layout import CacheLayout
from engine.core.host_index import HostIndex
from engine.core.kv_events import Name
from engine.core.page_pool import PagePool
from engine.core.request import Request
from engine.peers.kv_transport import KvTransport, Reading
from engine.peers.messages import Forget, HandedOver, Offer, Taken, ToPrefill, Welcome

logger = logging.getLogger(__name__)

STALL_S = 5.0
LONGEST_WAIT_S = 60.0
_MOST_REMEMBERED = 4096  # requests with offers that have not come themselves
Result = Literal["complete", "lost", "late"]


class LinksToPrefill(Protocol):
    """The connections to prefill engines: engine/peers/links.py."""

    @property
    def connecting(self) -> list[int]:
        """The prefill engines whose messages wait until this engine's ranks can read their memory."""
        ...

    def send(self, peer: int, message: ToPrefill) -> None:
        """Send to a prefill engine, if it is connected."""
        ...

    def poll(self) -> list[tuple[int, object]]:
        """Return what came, as (peer, message); None in place of a message: that connection is lost."""
        ...

    def drop(self, peer: int) -> None:
        """Close a connection whose peer cannot be used; it is tried again later."""
        ...


@dataclass(slots=True, eq=False)
class _Progress:
    """The offers of a request so far."""

    peer: int
    last_s: float
    num_copies: int = 0  # that run
    is_handed_over: bool = False

    @property
    def is_complete(self) -> bool:
        return self.is_handed_over and not self.num_copies


@dataclass(slots=True, eq=False)
class _Copy:
    """Blocks of one offer on their way into host memory."""

    number: int
    blocks: dict[Name, list[int]]  # their slots here
    waiters: list[_Progress]  # of the requests that it is offered for
    forgotten: set[Name] = field(default_factory=set)


class Arrivals:
    """Owns the copies that run and the requests that wait for them. O(1) per block."""

    def __init__(
        self,
        links: LinksToPrefill,
        transport: KvTransport,
        layout: CacheLayout,
        pool: PagePool,
        index: HostIndex,
        *,
        storing: Container[Name],
        slot_bytes: int,
        forget: Callable[[list[Name]], None],
    ) -> None:
        """storing: names of copies in flight to host memory. forget: lets blocks no longer be found in any tier."""
        self.waits: dict[Request, float] = {}  # since when
        self.num_blocks: Counter[str] = Counter()  # taken, known here already, without room, failed
        self.num_by_result: Counter[Result] = Counter()  # requests
        self.num_bytes = 0  # copied
        self.waited_s = 0.0  # over all requests
        self._links = links
        self._transport = transport
        self._layout = layout
        self._pool = pool
        self._index = index
        self._storing = storing
        self._slot_bytes = slot_bytes
        self._forget = forget
        self._connected: set[int] = set()
        self._copies: dict[Reading, _Copy] = {}
        self._coming: dict[Name, _Copy] = {}
        self._progress: OrderedDict[str, _Progress] = OrderedDict()

    @property
    def is_active(self) -> bool:
        """True while copies run or requests wait for them, or a connection is being made."""
        return bool(self._copies or self.waits) or bool(self._links.connecting)

    @property
    def peers(self) -> list[int]:
        """The prefill engines whose blocks can be read."""
        return sorted(self._connected)

    @property
    def slots(self) -> list[int]:
        """The slots that are taken for copies that run."""
        return [slot for copy in self._copies.values() for slots in copy.blocks.values() for slot in slots]

    def begin(self, request: Request, now: float) -> bool:
        """Let a request wait if blocks of it are on their way; return whether it waits. Once for each request."""
        if request in self.waits:
            return True
        hand_over = request.hand_over
        if hand_over is None or hand_over.is_prefill or request.has_asked_peer:
            return False
        request.has_asked_peer = True
        self.waits[request] = now
        self._end_waits(now)
        return request in self.waits

    def cancel(self, request: Request) -> None:
        """Let a request that ends wait no longer. What was offered of it is copied nevertheless."""
        self.waits.pop(request, None)
        self._progress.pop(request.request_id, None)

    def poll(self, now: float) -> None:
        """Handle messages, and take the copies that are done. Does not wait."""
        for peer, message in self._links.poll():
            self._handle(peer, message, now)
        for reading in self._transport.take_done():
            self._end_copy(reading, now)
        if self.waits:
            self._end_waits(now)

    def check(self) -> None:
        """Assert that every block that comes is in one copy, and cannot be found yet."""
        names = [name for copy in self._copies.values() for name in copy.blocks]
        assert sorted(names) == sorted(self._coming)
        for copy in self._copies.values():
            assert all(self._coming[name] is copy for name in copy.blocks)

    def _handle(self, peer: int, message: object, now: float) -> None:
        match message:
            case Welcome(memory):
                try:
                    self._transport.connect(peer, memory)
                    self._connected.add(peer)
                except OSError as error:
                    logger.error("memory of a prefill engine cannot be read index=%d reason=%r", peer, str(error))
                    self._links.drop(peer)
            case Offer():
                self._take(peer, message, now)
            case HandedOver(request_id):
                self._progress_of(request_id, peer, now).is_handed_over = True
            case Forget(names):
                self._forget(names)
                for name in names:
                    if name in self._coming:
                        self._coming[name].forgotten.add(name)
            case None:
                self._connected.discard(peer)
                self._transport.disconnect(peer)
                for request_id, progress in list(self._progress.items()):
                    if progress.peer == peer and not progress.is_handed_over:
                        del self._progress[request_id]

    def _take(self, peer: int, offer: Offer, now: float) -> None:
        """Begin to copy the blocks of an offer that are not here."""
        progress = self._progress_of(offer.request_id, peer, now)
        blocks: dict[Name, list[int]] = {}
        sources: list[int] = []
        for group, key, slots in ((block.group, block.key, block.slots) for block in offer.blocks):
            name = (group, key)
            copy = self._coming.get(name)
            if len(slots) != self._layout.groups[group].pages:
                self.num_blocks["failed"] += 1  # of another layout: the facts that were compared cannot be all
            elif copy is not None:
                if progress not in copy.waiters:
                    copy.waiters.append(progress)
                    progress.num_copies += 1
            elif self._pool.find(*name) is not None or self._index.touch(name) or name in self._storing:
                self.num_blocks["known"] += 1
            elif (targets := self._index.take(len(slots))) is None:
                self.num_blocks["no_room"] += 1
            else:
                blocks[name] = targets
                sources += slots
        if not blocks:
            self._links.send(peer, Taken([offer.number]))
            return
        reading = self._transport.read(peer, sources, [slot for slots in blocks.values() for slot in slots])
        copy = self._copies[reading] = _Copy(offer.number, blocks, [progress])
        self._coming.update(dict.fromkeys(blocks, copy))
        progress.num_copies += 1

    def _end_copy(self, reading: Reading, now: float) -> None:
        copy = self._copies.pop(reading)
        for name, slots in copy.blocks.items():
            del self._coming[name]
            is_new = self._index.find(name) is None and name not in self._storing and name not in copy.forgotten
            if reading.is_whole and is_new:
                self._index.add(name, slots)
            else:
                self._index.give_back(slots)
        self.num_blocks["taken" if reading.is_whole else "failed"] += len(copy.blocks)
        self.num_bytes += len(reading.targets) * self._slot_bytes * reading.is_whole
        self._links.send(reading.peer, Taken([copy.number]))
        for progress in copy.waiters:
            progress.num_copies -= 1
            progress.last_s = now

    def _progress_of(self, request_id: str, peer: int, now: float) -> _Progress:
        progress = self._progress.get(request_id)
        if progress is None or progress.peer != peer:
            progress = self._progress[request_id] = _Progress(peer, now)
            if len(self._progress) > _MOST_REMEMBERED:
                self._progress.popitem(last=False)
        progress.last_s = now
        return progress

    def _end_waits(self, now: float) -> None:
        reachable = self._connected.union(self._links.connecting)
        for request, began_s in list(self.waits.items()):
            assert request.hand_over is not None
            peer, progress = request.hand_over.peer, self._progress.get(request.request_id)
            last_s = began_s if progress is None else max(progress.last_s, began_s)
            if progress is not None and progress.is_complete:
                self._end_wait(request, "complete", now)
            elif not (peer in reachable or (progress and progress.is_handed_over)):
                self._end_wait(request, "lost", now)
            elif now - last_s > STALL_S or now - began_s > LONGEST_WAIT_S:
                self._end_wait(request, "late", now)

    def _end_wait(self, request: Request, result: Result, now: float) -> None:
        self.waited_s += now - self.waits.pop(request)
        self.num_by_result[result] += 1
        self._progress.pop(request.request_id, None)
