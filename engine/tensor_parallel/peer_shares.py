"""Shares of blocks that go from engine to engine: each rank copies its own part of a block. Never torch.

Rank r of a decode engine reads out of the host memory of rank r of a prefill engine: both are split alike, so these
have the same heads. The first rank of each has the messages of the hand-over (engine/peers/messages.py), and its slots
are numbered as those of the others. So it asks the others for the same copies; no bytes pass between ranks.

    decode engine:   ConnectingLinks → ConnectPeer to each rank … PeerDone of each → Arrivals hears of the peer
                     Arrivals → RankedTransport.read → ReadSlots to each rank … PeerDone of each → the Reading is done
    prefill engine:  Offers → FencedLinks.send → EndStep to each rank … PeerDone of each → the offer leaves
    other ranks:     run_plans → PeerShare.begin → a thread of its own → PeerDone

A rank may be a step behind the first one. Slots that a step of the prefill engine has filled are offered when all its
ranks have ended this step; slots that a step of the decode engine has freed are written when the rank has ended it.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.peers.kv_transport import KvTransport, Reading

logger = logging.getLogger(__name__)

_POLL_S = 0.0005  # of a rank whose copies run
_CONNECT_S = 10.0  # until a rank that has not connected is one that cannot
_MEMORY_S = 600.0  # until a rank that has loaded its share tells of its memory


class TellMemory(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank what a peer's rank needs to read its slots."""

    job_id: int


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to get access to the slots of the same rank of a peer."""

    job_id: int
    peer: int
    memory: bytes


class DisconnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to give up access to a peer's slots. It is not answered."""

    peer: int


class ReadSlots(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to copy slots of a connected peer."""

    job_id: int
    peer: int
    sources: list[int]
    targets: list[int]
    after_step: int  # the last step that the first rank has committed; -1: none


class EndStep(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to answer when it has ended a step, too."""

    job_id: int
    after_step: int


class PeerDone(msgspec.Struct, frozen=True, tag=True):
    """Answers each of these but DisconnectPeer."""

    job_id: int
    fault: str = ""  # "": it is done
    memory: bytes = b""  # of TellMemory


PeerJob = TellMemory | ConnectPeer | DisconnectPeer | ReadSlots | EndStep
Answers = dict[int, PeerDone]  # by rank


class OtherRanks:
    """The ranks after the first, as its loop asks them. take() is called by other threads, all else by the loop."""

    def __init__(self, tell: Callable[[int, PeerJob], None], *, num_ranks: int) -> None:
        """tell: sends to a rank. num_ranks: with the first."""
        self.ranks = range(1, num_ranks)
        self._tell = tell
        self._ids = itertools.count()
        self._answers: dict[int, Answers] = {}
        self._changed = threading.Condition()

    def ask(self, job: Callable[[int, int], PeerJob]) -> int:
        """Ask every rank for a job, by its number and the rank; return the number."""
        job_id = next(self._ids)
        with self._changed:
            self._answers[job_id] = {}
        for rank in self.ranks:
            self._tell(rank, job(job_id, rank))
        return job_id

    def tell(self, job: PeerJob) -> None:
        """Send a job that is not answered."""
        for rank in self.ranks:
            self._tell(rank, job)

    def take(self, rank: int, answer: PeerDone) -> None:
        """Take a rank's answer."""
        with self._changed:
            if answer.job_id in self._answers:  # else it was given up
                self._answers[answer.job_id][rank] = answer
                self._changed.notify_all()

    def answers(self, job_id: int) -> Answers | None:
        """Return the answers to a job, once; None: some are missing."""
        with self._changed:
            return self._answers.pop(job_id) if self._has_all(job_id) else None

    def give_up(self, job_id: int) -> Answers:
        """Ignore the answers to a job that will still come; return those that have."""
        with self._changed:
            return self._answers.pop(job_id, {})

    def wait(self, job_id: int, timeout_s: float) -> Answers:
        """Wait for the answers to a job, and return those that came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_all(job_id), timeout_s)
            return self._answers.pop(job_id)

    def memories(self) -> list[bytes]:
        """Return what each rank tells of its memory. Blocks. Raises OSError if one does not."""
        answers = self.wait(self.ask(lambda job_id, rank: TellMemory(job_id)), _MEMORY_S)
        if silent := [rank for rank in self.ranks if rank not in answers]:
            raise OSError(f"rank {silent[0]} has not told of its memory within {_MEMORY_S:g} s")
        return [answers[rank].memory for rank in self.ranks]

    def _has_all(self, job_id: int) -> bool:
        return len(self._answers[job_id]) == len(self.ranks)


@dataclass(slots=True, eq=False)
class _Whole:
    """A copy by all ranks."""

    reading: Reading
    job_id: int
    is_own_done: bool = False
    others_are_done: bool = False
    is_whole: bool = True


class RankedTransport:
    """KvTransport of a split model: a copy is done when all ranks' are, and whole if all are. Used by the loop."""

    def __init__(
        self,
        own: KvTransport,
        others: OtherRanks,
        *,
        committed_step: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """own: the first rank's, its caller's. committed_step: the last step that it has committed, or -1.

        Waits until all ranks have told of their memory. Raises OSError if one does not.
        """
        self._own = own
        self._others = others
        self._committed_step = committed_step
        self._clock = clock
        self._memories = others.memories()
        self._connecting: dict[int, tuple[int, float]] = {}  # by peer: the job, and until when it is waited for
        self._open: dict[Reading, _Whole] = {}  # by that of the first rank

    @property
    def memory(self) -> bytes:
        """See KvTransport.memory: that of all ranks."""
        return msgspec.msgpack.encode([self._own.memory, *self._memories])

    def begin_connect(self, peer: int, memory: bytes) -> None:
        """Let all ranks connect; connect() may be called once is_connected(). Does not wait. Raises OSError."""
        self._give_up(peer)
        try:
            own, *theirs = msgspec.msgpack.decode(memory, type=list[bytes])
        except (msgspec.MsgspecError, ValueError) as error:
            raise OSError(f"the memory of the peer's ranks is not described as expected: {error}") from error
        if len(theirs) != len(self._others.ranks):
            raise OSError(f"it has {len(theirs) + 1} ranks, and this engine has {len(self._others.ranks) + 1}")
        self._own.connect(peer, own)
        job_id = self._others.ask(lambda job_id, rank: ConnectPeer(job_id, peer, theirs[rank - 1]))
        self._connecting[peer] = (job_id, self._clock() + _CONNECT_S)

    def is_connected(self, peer: int) -> bool:
        """Return whether all ranks have connected, after begin_connect(). Raises OSError if one cannot."""
        job_id, ends_s = self._connecting[peer]
        answers = self._others.answers(job_id)
        if answers is None:
            if self._clock() < ends_s:
                return False
            answers = self._others.give_up(job_id)
        for rank in self._others.ranks:
            fault = answers[rank].fault if rank in answers else f"it has not answered within {_CONNECT_S:g} s"
            if fault:
                self.disconnect(peer)
                raise OSError(f"rank {rank}: {fault}")
        del self._connecting[peer]
        return True

    def connect(self, peer: int, memory: bytes) -> None:
        """See KvTransport.connect: begin_connect() and is_connected() have done it."""
        assert peer not in self._connecting

    def disconnect(self, peer: int) -> None:
        """See KvTransport.disconnect."""
        self._give_up(peer)
        self._own.disconnect(peer)
        self._others.tell(DisconnectPeer(peer))

    def read(self, peer: int, sources: list[int], targets: list[int]) -> Reading:
        """See KvTransport.read."""
        step = self._committed_step()
        job_id = self._others.ask(lambda job_id, rank: ReadSlots(job_id, peer, sources, targets, step))
        reading = Reading(peer, sources, targets)
        self._open[self._own.read(peer, sources, targets)] = _Whole(reading, job_id)
        return reading

    def take_done(self) -> list[Reading]:
        """See KvTransport.take_done."""
        for own in self._own.take_done():
            self._open[own].is_own_done = True
            self._open[own].is_whole &= own.is_whole
        done: list[Reading] = []
        for own, whole in list(self._open.items()):
            if not whole.others_are_done and (answers := self._others.answers(whole.job_id)) is not None:
                whole.others_are_done = True
                whole.is_whole &= not any(answer.fault for answer in answers.values())
            if whole.is_own_done and whole.others_are_done:
                del self._open[own]
                whole.reading.is_done, whole.reading.is_whole = True, whole.is_whole
                done.append(whole.reading)
        return done

    def _give_up(self, peer: int) -> None:
        if (connecting := self._connecting.pop(peer, None)) is not None:
            self._others.give_up(connecting[0])


class PeerShare:
    """The side of a rank after the first: copies its slots, in a thread of its own."""

    def __init__(
        self, transport: KvTransport, answer: Callable[[PeerDone], None], on_fault: Callable[[BaseException], None]
    ) -> None:
        """transport: used by the thread alone from here on. answer: sends to the first rank. on_fault: of the thread,
        which has ended by it.
        """
        self._transport = transport
        self._answer = answer
        self._on_fault = on_fault
        self._jobs: queue.SimpleQueue[PeerJob] = queue.SimpleQueue()
        self._reading: dict[Reading, int] = {}  # their jobs
        threading.Thread(target=self._run, name="kv-peers", daemon=True).start()

    def begin(self, job: PeerJob) -> None:
        """Begin a job, whose step has ended. Does not wait."""
        self._jobs.put(job)

    def _run(self) -> None:
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=_POLL_S if self._reading else None)
                except queue.Empty:
                    pass
                else:
                    self._do(job)
                for reading in self._transport.take_done():
                    fault = "" if reading.is_whole else "not all slots were copied"
                    self._answer(PeerDone(self._reading.pop(reading), fault))
        except BaseException as error:
            self._on_fault(error)

    def _do(self, job: PeerJob) -> None:
        match job:
            case TellMemory(job_id):
                self._answer(PeerDone(job_id, memory=self._transport.memory))
            case ConnectPeer(job_id, peer, memory):
                try:
                    self._transport.connect(peer, memory)
                except OSError as error:
                    self._answer(PeerDone(job_id, fault=str(error)))
                else:
                    self._answer(PeerDone(job_id))
            case DisconnectPeer(peer):
                self._transport.disconnect(peer)
            case ReadSlots(job_id, peer, sources, targets):
                self._reading[self._transport.read(peer, sources, targets)] = job_id
            case EndStep(job_id):
                self._answer(PeerDone(job_id))
