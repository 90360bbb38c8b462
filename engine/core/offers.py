"""Offers: gives the blocks of prompts to decode engines while they are computed. Plain Python; never torch.

The prefill engine's side of a hand-over (docs/explanation/disaggregation.md). A block that is published is copied to
host memory before all others (HostTier.want). Then it is offered to the request's decode engine, which reads it from
there. Its slots stay as they are until that engine says so, or its connection ends.

Blocks of layers with full attention are offered after each chunk. At the prompt's end all blocks of the longest hit
follow that were not offered: of windows, saved states, and what was in the cache before. Then HandedOver is sent. A
block that is evicted before its copy is not offered, and the decode engine computes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.cache_layout import CacheLayout
from engine.core.host_index import HostBlock
from engine.core.host_tier import HostTier
from engine.core.kv_events import Name
from engine.core.prefix_hits import PrefixFinder, hit_names
from engine.core.request import Request, Status
from engine.peers.messages import Forget, HandedOver, Offer, OfferedBlock, Taken, ToDecode

GIVE_UP_S = 30.0  # after the end of a prompt: until what was not copied is given up
_MOST_AT_ONCE = 64  # blocks of an offer


class LinksToDecode(Protocol):
    """The connections to decode engines: engine/peers/links.py."""

    @property
    def peers(self) -> list[int]:
        """The decode engines that are connected."""
        ...

    @property
    def is_holding(self) -> bool:
        """True while messages wait until they can leave, at a later poll()."""
        ...

    def send(self, peer: int, message: ToDecode) -> None:
        """Send to a decode engine, if it is connected."""
        ...

    def poll(self) -> list[tuple[int, object]]:
        """Return what came, as (peer, message); None in place of a message: that connection is lost."""
        ...


@dataclass(slots=True, eq=False)
class _Giving:
    """A request whose blocks are given to a decode engine."""

    peer: int
    num_published: list[int]  # of each full group, the first columns that were looked at
    pending: dict[Name, None] = field(default_factory=dict)  # to be offered, once they are on the host
    offered: set[Name] = field(default_factory=set)
    give_up_s: float | None = None  # set at the prompt's end


class Offers:
    """Owns what is given, and the offers that were not taken. O(1) per block and iteration while it is pending."""

    def __init__(self, links: LinksToDecode, layout: CacheLayout, host: HostTier) -> None:
        self.num_offered = 0  # blocks
        self.num_lost = 0  # blocks that were evicted before they could be offered
        self._links = links
        self._layout = layout
        self._host = host
        self._finder = PrefixFinder(layout, host.both)
        self._giving: dict[Request, _Giving] = {}
        self._open: dict[int, dict[int, list[HostBlock]]] = {}  # by peer, by number of the offer
        self._next_number = 0

    @property
    def is_active(self) -> bool:
        """True while a prompt's blocks are given."""
        return bool(self._giving) or self._links.is_holding

    @property
    def is_urgent(self) -> bool:
        """True while blocks of a prompt that is whole wait for their copy: its next token waits for them."""
        return any(giving.give_up_s is not None and giving.pending for giving in self._giving.values())

    @property
    def num_open(self) -> int:
        """Offers that were not taken yet."""
        return sum(len(offers) for offers in self._open.values())

    def begin(self, request: Request) -> None:
        """Give the blocks of a request that was queued, if its prompt is computed for a decode engine."""
        hand_over = request.hand_over
        if hand_over is not None and hand_over.is_prefill:
            self._giving[request] = _Giving(hand_over.peer, [0] * len(self._layout.full))

    def poll(self, now: float) -> None:
        """Handle messages, and offer what can be offered. Does not wait."""
        for peer, message in self._links.poll():
            if message is None:
                self._lose(peer)
            elif isinstance(message, Taken):
                self._end_offers(peer, message.numbers)
        for request, giving in list(self._giving.items()):
            self._advance(request, giving, now)

    def forget(self, names: list[Name]) -> None:
        """Let decode engines no longer find blocks: their values are not finite, perhaps."""
        for peer in self._links.peers:
            self._links.send(peer, Forget(names))

    def check(self) -> None:
        """Assert that the slots of all open offers are kept."""
        for offers in self._open.values():
            for blocks in offers.values():
                assert all(block.num_readers > 0 for block in blocks)

    def _advance(self, request: Request, giving: _Giving, now: float) -> None:
        if request.finish_reason in (None, "length"):
            self._note_published(request, giving)
        else:  # nobody goes on with it
            giving.pending.clear()
            giving.give_up_s = now
        if request.status is Status.FINISHED and giving.give_up_s is None:
            self._note_hit(request, giving)
            giving.give_up_s = now + GIVE_UP_S
        if giving.peer in self._links.peers:
            self._offer(request, giving)
        else:
            giving.pending.clear()
        if giving.give_up_s is not None and (not giving.pending or now >= giving.give_up_s):
            self._links.send(giving.peer, HandedOver(request.request_id))
            del self._giving[request]

    def _note_published(self, request: Request, giving: _Giving) -> None:
        """Queue the blocks that were published since the last call, while the request runs."""
        if not request.tables:
            return
        for place, group in enumerate(self._layout.full):
            table = request.tables[group.index]
            first, giving.num_published[place] = giving.num_published[place], table.num_published
            self._queue(
                giving,
                (
                    (group.index, request.block_hashes[(column + 1) * group.links - 1])
                    for column in range(first, table.num_published)
                ),
            )

    def _note_hit(self, request: Request, giving: _Giving) -> None:
        """Queue what a request with this prompt would find now."""
        hit = self._finder.find(request)
        for group in self._layout.groups:
            if hit.num_tokens:
                self._queue(giving, hit_names(request, group, hit.num_tokens))

    def _queue(self, giving: _Giving, names: Iterable[Name]) -> None:
        giving.pending.update((name, None) for name in names if name not in giving.offered)

    def _offer(self, request: Request, giving: _Giving) -> None:
        index, ready = self._host.index, []
        for name in list(giving.pending):
            block = index.find(name)
            if block is not None:
                ready.append(block)
            elif not self._host.want(name):
                self.num_lost += 1
                del giving.pending[name]
        for first in range(0, len(ready), _MOST_AT_ONCE):
            blocks = ready[first : first + _MOST_AT_ONCE]
            self._next_number += 1
            self._open.setdefault(giving.peer, {})[self._next_number] = blocks
            told = [OfferedBlock(*block.name, block.slots) for block in blocks]
            for block in blocks:
                index.begin_reading(block)
                giving.offered.add(block.name)
                del giving.pending[block.name]
            self.num_offered += len(blocks)
            self._links.send(giving.peer, Offer(self._next_number, request.request_id, told))

    def _end_offers(self, peer: int, numbers: Iterable[int]) -> None:
        offers = self._open.get(peer, {})
        for number in numbers:
            for block in offers.pop(number, []):
                self._host.index.end_reading(block)

    def _lose(self, peer: int) -> None:
        """Let the slots of a peer go, which has ended. Prompts in work are offered from their beginning to the next."""
        self._end_offers(peer, list(self._open.get(peer, {})))
        for giving in self._giving.values():
            if giving.peer == peer:
                giving.num_published = [0] * len(self._layout.full)
                giving.offered.clear()
