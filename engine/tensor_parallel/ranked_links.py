"""ConnectingLinks and FencedLinks: links between engines of several ranks, which wait for the ranks. Never torch.

The first rank of each engine has its links (engine/peers/links.py). What they tell holds for all ranks: a prefill
engine is heard of when all ranks of the decode engine can read its memory, and an offer leaves a prefill engine when
all its ranks have filled the slots. No loop waits for a rank; the messages do.
"""

import logging
from collections import deque
from collections.abc import Callable

from engine.core.arrivals import LinksToPrefill
from engine.core.offers import LinksToDecode
from engine.peers.messages import Offer, ToDecode, ToPrefill, Welcome
from engine.tensor_parallel.peer_shares import EndStep, OtherRanks, RankedTransport

logger = logging.getLogger(__name__)


class ConnectingLinks:
    """LinksToPrefill of a split model: a peer is heard of when all ranks can read its memory. The loop never waits.

    A rank that is in a step connects after it. What the peer sends meanwhile is held.
    """

    def __init__(self, links: LinksToPrefill, transport: RankedTransport) -> None:
        self._links = links
        self._transport = transport
        self._held: dict[int, list[tuple[int, object]]] = {}  # by peer: what came, from Welcome on

    @property
    def connecting(self) -> list[int]:
        """See LinksToPrefill.connecting."""
        return list(self._held)

    def send(self, peer: int, message: ToPrefill) -> None:
        """See LinksToPrefill.send."""
        self._links.send(peer, message)

    def drop(self, peer: int) -> None:
        """See LinksToPrefill.drop."""
        self._held.pop(peer, None)
        self._links.drop(peer)

    def poll(self) -> list[tuple[int, object]]:
        """See LinksToPrefill.poll."""
        came: list[tuple[int, object]] = []
        for peer, message in self._links.poll():
            if isinstance(message, Welcome):
                self._held[peer] = [(peer, message)]
                try:
                    self._transport.begin_connect(peer, message.memory)
                except OSError as error:
                    self._refuse(peer, error)
            elif message is None:
                self._held.pop(peer, None)
                came.append((peer, None))
            elif peer in self._held:
                self._held[peer].append((peer, message))
            else:
                came.append((peer, message))
        for peer in list(self._held):
            try:
                if self._transport.is_connected(peer):
                    came += self._held.pop(peer)
            except OSError as error:
                self._refuse(peer, error)
        return came

    def _refuse(self, peer: int, error: OSError) -> None:
        logger.error("memory of a prefill engine cannot be read index=%d reason=%r", peer, str(error))
        self.drop(peer)


class FencedLinks:
    """LinksToDecode of a split model: offers leave when all ranks have ended the step that has filled their slots."""

    def __init__(self, links: LinksToDecode, others: OtherRanks, *, committed_step: Callable[[], int]) -> None:
        """committed_step: the last step that the first rank has committed, or -1."""
        self._links = links
        self._others = others
        self._committed_step = committed_step
        self._held: deque[tuple[int, ToDecode, int]] = deque()  # peer, message and the step that it follows, in order
        self._asked: deque[tuple[int, int]] = deque()  # jobs of EndStep and their steps
        self._asked_step = self._ended_step = -1  # the latest that all ranks were asked for, and that they have ended

    @property
    def peers(self) -> list[int]:
        """See LinksToDecode.peers."""
        return self._links.peers

    @property
    def is_holding(self) -> bool:
        """See LinksToDecode.is_holding."""
        return bool(self._held)

    def send(self, peer: int, message: ToDecode) -> None:
        """See LinksToDecode.send. What follows an offer that waits, waits as well."""
        step = self._committed_step() if isinstance(message, Offer) else -1
        if step > self._asked_step:
            self._asked.append((self._others.ask(lambda job_id, rank: EndStep(job_id, step)), step))
            self._asked_step = step
        self._held.append((peer, message, step))
        self._release()

    def poll(self) -> list[tuple[int, object]]:
        """See LinksToDecode.poll."""
        came = self._links.poll()
        lost = {peer for peer, message in came if message is None}
        if lost:  # their next connection must not hear of slots that were offered to this one
            self._held = deque(held for held in self._held if held[0] not in lost)
        while self._asked and self._others.answers(self._asked[0][0]) is not None:
            self._ended_step = self._asked.popleft()[1]
        self._release()
        return came

    def _release(self) -> None:
        while self._held and self._held[0][2] <= self._ended_step:
            peer, message, _ = self._held.popleft()
            self._links.send(peer, message)
