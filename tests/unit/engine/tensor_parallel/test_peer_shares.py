"""Each rank copies its part of the blocks of another engine; a copy is done when all are, and an offer safe for all."""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from engine.peers.kv_transport import Reading
from engine.peers.messages import Forget, HandedOver, Offer, Welcome
from engine.peers.shared_memory import HAS_MEMFD, SharedMemory, SharedSlots
from engine.tensor_parallel import peer_shares
from engine.tensor_parallel.peer_shares import (
    ConnectPeer,
    DisconnectPeer,
    EndStep,
    OtherRanks,
    PeerDone,
    PeerJob,
    PeerShare,
    RankedTransport,
    ReadSlots,
    TellMemory,
)
from engine.tensor_parallel.ranked_links import ConnectingLinks, FencedLinks

pytestmark = pytest.mark.skipif(not HAS_MEMFD, reason="needs memfd_create")
NUM_RANKS = 3
NUM_SLOTS = 6
SLOT_BYTES = 512
LONG_S = 60.0
STEP = 5


class Side:
    """An engine of several ranks in this process, with the slots of each."""

    def __init__(self, number: int, num_ranks: int = NUM_RANKS) -> None:
        self.slots = [SharedSlots(num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES) for _ in range(num_ranks)]
        for rank, slots in enumerate(self.slots):
            for slot in range(NUM_SLOTS):
                slots.array[slot] = 100 * number + 10 * rank + slot
        self.told: list[tuple[int, PeerJob]] = []
        self.held: list[PeerJob] = []  # of rank 1, while it holds
        self.is_holding = False
        self.faults: dict[int, str] = {}  # by rank: what it answers instead
        self.thread_faults: list[BaseException] = []
        self.others = OtherRanks(self._tell, num_ranks=num_ranks)
        self.own = SharedMemory(self.slots[0])
        self.transports = [SharedMemory(slots) for slots in self.slots[1:]]
        self.shares = [
            PeerShare(transport, lambda done, rank=rank: self.others.take(rank, done), self.thread_faults.append)  # type: ignore[misc]
            for rank, transport in enumerate(self.transports, 1)
        ]
        self.now = 0.0
        self.transport = RankedTransport(self.own, self.others, committed_step=lambda: STEP, clock=lambda: self.now)

    def _tell(self, rank: int, job: PeerJob) -> None:
        self.told.append((rank, job))
        if rank == 1 and self.is_holding:
            self.held.append(job)
        elif rank in self.faults and isinstance(job, ConnectPeer | ReadSlots):
            self.others.take(rank, PeerDone(job.job_id, fault=self.faults[rank]))
        else:
            self.shares[rank - 1].begin(job)

    def go_on(self) -> None:
        self.is_holding = False
        for job in self.held:
            self.shares[0].begin(job)
        self.held = []

    def connect(self, memory: bytes, peer: int = 7) -> None:
        """Connect, and wait for it. Raises OSError."""
        self.transport.begin_connect(peer, memory)
        until_s = time.monotonic() + LONG_S
        while not self.transport.is_connected(peer):
            assert time.monotonic() < until_s
            time.sleep(0)
        self.transport.connect(peer, memory)

    def end(self, reading: Reading) -> bool:
        """Wait for a copy; return whether it is whole."""
        until_s = time.monotonic() + LONG_S
        while not (done := self.transport.take_done()):
            assert time.monotonic() < until_s
            time.sleep(0)
        assert done == [reading]
        assert reading.is_done
        return reading.is_whole

    def values(self, slot: int) -> list[int]:
        return [int(slots.array[slot][0]) for slots in self.slots]

    def close(self) -> None:
        for transport in (self.own, *self.transports):
            transport.close()
        for slots in self.slots:
            slots.close()


@pytest.fixture
def side_of() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(*arguments: int) -> Side:
        made.append(Side(*arguments))
        return made[-1]

    yield make
    for side in made:
        side.close()


@pytest.fixture
def sides(side_of: Callable[..., Side]) -> tuple[Side, Side]:
    """A prefill engine, and a decode engine that has access to its slots."""
    prefill, decode = side_of(0), side_of(1)
    decode.connect(prefill.transport.memory)
    return prefill, decode


def test_each_rank_copies_the_slots_of_its_own(sides: tuple[Side, Side]) -> None:
    _, decode = sides
    assert decode.end(decode.transport.read(7, [2, 0, 4], [1, 5, 0]))
    assert decode.values(1) == [2, 12, 22]
    assert decode.values(5) == [0, 10, 20]
    assert decode.values(0) == [4, 14, 24]
    assert decode.values(3) == [103, 113, 123], "of no copy"
    asked = [job for rank, job in decode.told if isinstance(job, ReadSlots)]
    assert [(job.sources, job.targets, job.after_step) for job in asked] == [([2, 0, 4], [1, 5, 0], STEP)] * 2


def test_a_copy_is_done_when_the_last_rank_has_its_part(sides: tuple[Side, Side]) -> None:
    _, decode = sides
    decode.is_holding = True
    reading = decode.transport.read(7, [2], [1])
    until_s = time.monotonic() + LONG_S
    while decode.values(1) != [2, 111, 22]:
        assert time.monotonic() < until_s
        assert not decode.transport.take_done()
    assert not reading.is_done
    decode.go_on()
    assert decode.end(reading)
    assert decode.values(1) == [2, 12, 22]


def test_many_copies_end_each_once(sides: tuple[Side, Side]) -> None:
    _, decode = sides
    draw, open_ = random.Random(3), set()
    for _ in range(200):
        decode.is_holding = draw.random() < 0.5
        slots = draw.sample(range(NUM_SLOTS), 2)
        open_.add(decode.transport.read(7, slots, slots))
        if not decode.is_holding:
            decode.go_on()
        for reading in decode.transport.take_done():
            open_.remove(reading)
            assert reading.is_whole
    decode.go_on()
    until_s = time.monotonic() + LONG_S
    while open_:
        assert time.monotonic() < until_s
        open_ -= set(decode.transport.take_done())
    assert not decode.transport.take_done()
    assert [decode.values(slot) for slot in range(NUM_SLOTS)] == [[s, 10 + s, 20 + s] for s in range(NUM_SLOTS)]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_fails_spoils_the_copy(sides: tuple[Side, Side], rank: int) -> None:
    _, decode = sides
    decode.faults[rank] = "no"
    assert not decode.end(decode.transport.read(7, [2], [1]))
    del decode.faults[rank]
    assert decode.end(decode.transport.read(7, [2], [1]))


def test_a_peer_that_is_gone_spoils_the_copy_on_every_rank(sides: tuple[Side, Side]) -> None:
    _, decode = sides
    decode.transport.disconnect(7)
    assert not decode.end(decode.transport.read(7, [2], [1]))
    assert decode.values(1) == [101, 111, 121]


def test_engines_of_other_numbers_of_ranks_are_refused(side_of: Callable[..., Side]) -> None:
    prefill, decode = side_of(0, 2), side_of(1, 3)
    with pytest.raises(OSError, match="it has 2 ranks, and this engine has 3"):
        decode.connect(prefill.transport.memory)
    with pytest.raises(OSError, match="is not described as expected"):
        decode.connect(prefill.own.memory)
    with pytest.raises(OSError, match="is not described as expected"):
        decode.connect(b"\x90")  # no rank


def test_a_rank_that_cannot_connect_is_named_and_the_others_give_up(side_of: Callable[..., Side]) -> None:
    prefill, decode = side_of(0), side_of(1)
    decode.faults[2] = "its memory is not on this host"
    with pytest.raises(OSError, match="rank 2: its memory is not on this host"):
        decode.connect(prefill.transport.memory)
    assert [job for _, job in decode.told[-2:]] == [DisconnectPeer(7)] * 2
    assert not decode.end(decode.transport.read(7, [2], [1]))


def test_a_rank_whose_peer_has_other_slots_says_so(side_of: Callable[..., Side]) -> None:
    prefill, decode = side_of(0), side_of(1)
    prefill.slots.append(SharedSlots(num_slots=1, slot_bytes=7))
    prefill.transports[1]._slots = prefill.slots[-1]
    with pytest.raises(OSError, match=f"rank 2: its slots have 7 bytes and those here {SLOT_BYTES}"):
        decode.connect(RankedTransport(prefill.own, prefill.others, committed_step=lambda: 0).memory)


def test_a_rank_that_does_not_answer_is_one_that_cannot_connect(side_of: Callable[..., Side]) -> None:
    prefill, decode = side_of(0), side_of(1)
    decode.is_holding = True
    decode.transport.begin_connect(7, prefill.transport.memory)
    assert not decode.transport.is_connected(7)
    decode.now = 10.0
    with pytest.raises(OSError, match=r"rank 1: it has not answered within 10 s"):
        decode.transport.is_connected(7)
    assert not decode.others._answers
    decode.go_on()  # its late answer is nobody's
    decode.connect(prefill.transport.memory)
    assert decode.end(decode.transport.read(7, [2], [1]))


def test_a_peer_is_heard_of_when_all_ranks_can_read_it(side_of: Callable[..., Side]) -> None:
    prefill, decode, link = side_of(0), side_of(1), Link()
    links = ConnectingLinks(link, decode.transport)
    decode.is_holding = True
    welcome, offer = Welcome(prefill.transport.memory), Offer(0, "a", [])
    link.came += [(7, welcome), (7, offer), (3, HandedOver("b"))]
    assert links.poll() == [(3, HandedOver("b"))]  # at once, though rank 1 has not answered
    assert links.poll() == []
    assert links.connecting == [7]
    decode.go_on()
    until_s = time.monotonic() + LONG_S
    while not (came := links.poll()):
        assert time.monotonic() < until_s
    assert came == [(7, welcome), (7, offer)]
    assert links.connecting == []
    decode.transport.connect(7, welcome.memory)
    assert decode.end(decode.transport.read(7, [2], [1]))


def test_a_peer_that_a_rank_cannot_read_is_dropped(
    side_of: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode, link = side_of(0), side_of(1), Link()
    links = ConnectingLinks(link, decode.transport)
    decode.faults[2] = "no"
    link.came += [(7, Welcome(prefill.transport.memory)), (7, Offer(0, "a", []))]
    until_s = time.monotonic() + LONG_S
    while not link.dropped:
        assert links.poll() == []
        assert time.monotonic() < until_s
    assert "index=7 reason='rank 2: no'" in caplog.text
    link.came += [(7, Welcome(b"\x90"))]
    assert links.poll() == []
    assert link.dropped == [7, 7]
    assert "is not described as expected" in caplog.text
    assert links.connecting == []


def test_a_peer_that_is_lost_while_ranks_connect_is_given_up(side_of: Callable[..., Side]) -> None:
    prefill, decode, link = side_of(0), side_of(1), Link()
    links = ConnectingLinks(link, decode.transport)
    decode.is_holding = True
    link.came += [(7, Welcome(prefill.transport.memory)), (7, Offer(0, "a", []))]
    links.poll()
    link.came += [(7, None)]
    assert links.poll() == [(7, None)]
    decode.transport.disconnect(7)  # as Arrivals does
    decode.go_on()
    assert links.poll() == []
    assert links.connecting == []
    assert not decode.others._answers


def test_a_rank_that_does_not_tell_of_its_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_shares, "_MEMORY_S", 0.01)
    others = OtherRanks(lambda rank, job: None, num_ranks=2)
    with pytest.raises(OSError, match=r"rank 1 has not told of its memory within 0\.01 s"):
        others.memories()


def test_a_fault_of_a_ranks_thread_is_told_once(side_of: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    side = side_of(0)

    def broken() -> list[Reading]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(side.transports[0], "take_done", broken)
    side.shares[0].begin(TellMemory(-1))
    until_s = time.monotonic() + LONG_S
    while not side.thread_faults:
        assert time.monotonic() < until_s
        time.sleep(0)
    assert [str(error) for error in side.thread_faults] == ["a bug"]


class Link:
    """LinksToDecode, or to a prefill engine, whose messages a test takes."""

    is_holding = False

    def __init__(self) -> None:
        self.peers = [0, 1]
        self.sent: list[tuple[int, object]] = []
        self.came: deque[tuple[int, object]] = deque()
        self.dropped: list[int] = []

    def drop(self, peer: int) -> None:
        self.dropped.append(peer)

    def send(self, peer: int, message: object) -> None:
        self.sent.append((peer, message))

    def poll(self) -> list[tuple[int, object]]:
        came, self.came = list(self.came), deque()
        return came


class Fence:
    """FencedLinks over a Link, with two ranks that answer when a test lets them."""

    def __init__(self) -> None:
        self.step = 3
        self.asked: list[tuple[int, EndStep]] = []
        self.others = OtherRanks(self._tell, num_ranks=3)
        self.link = Link()
        self.links = FencedLinks(self.link, self.others, committed_step=lambda: self.step)

    def _tell(self, rank: int, job: PeerJob) -> None:
        assert isinstance(job, EndStep)
        self.asked.append((rank, job))

    def answer(self, rank: int) -> None:
        for asked in [(told, job) for told, job in self.asked if told == rank]:
            self.asked.remove(asked)
            self.others.take(rank, PeerDone(asked[1].job_id))


OFFERS = [Offer(number, "a", []) for number in range(4)]


def test_an_offer_leaves_when_all_ranks_have_ended_its_step() -> None:
    fence = Fence()
    fence.links.send(0, OFFERS[0])
    assert [(rank, job.after_step) for rank, job in fence.asked] == [(1, 3), (2, 3)]
    for rank in (2, 1):
        assert fence.links.poll() == []
        assert fence.link.sent == []
        assert fence.links.is_holding
        fence.answer(rank)
    fence.links.poll()
    assert fence.link.sent == [(0, OFFERS[0])]
    assert not fence.links.is_holding
    fence.links.send(1, OFFERS[1])  # of the same step
    assert fence.link.sent == [(0, OFFERS[0]), (1, OFFERS[1])]
    assert not fence.asked


def test_messages_keep_their_order_and_those_without_slots_wait_for_nothing_else() -> None:
    fence = Fence()
    forget = Forget([(0, b"key")])
    fence.links.send(0, forget)
    assert fence.link.sent == [(0, forget)]
    fence.links.send(0, OFFERS[0])
    fence.step = 4
    fence.links.send(0, OFFERS[1])
    fence.links.send(0, HandedOver("a"))
    assert fence.link.sent == [(0, forget)]
    assert [job.after_step for rank, job in fence.asked if rank == 1] == [3, 4]
    fence.answer(1)
    fence.answer(2)
    fence.links.poll()
    assert fence.link.sent == [(0, forget), (0, OFFERS[0]), (0, OFFERS[1]), (0, HandedOver("a"))]


def test_offers_to_a_connection_that_is_lost_do_not_go_to_the_next() -> None:
    fence = Fence()
    fence.links.send(0, OFFERS[0])
    fence.links.send(1, OFFERS[1])
    fence.links.send(0, HandedOver("a"))
    fence.link.came += [(0, None)]
    assert fence.links.poll() == [(0, None)]
    fence.links.send(0, OFFERS[2])  # to the next connection
    fence.answer(1)
    fence.answer(2)
    fence.links.poll()
    assert fence.link.sent == [(1, OFFERS[1]), (0, OFFERS[2])]
    assert fence.links.peers == [0, 1]
