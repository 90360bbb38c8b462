"""NixlTransport: a KvTransport over NIXL (the extra quire[disaggregate]), with its UCX backend. Never torch itself.

NIXL finds the way between two processes: shared memory within a host, RDMA or TCP between hosts. Slots are registered
once, and descriptors of all slots are prepared when a peer connects, so a read names slots by their numbers. The
descriptions that connect() needs travel over the engines' own connection, so NIXL opens no port for them.
"""

import functools
import importlib
import logging
import os
import secrets
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from engine.peers.kv_transport import Reading

logger = logging.getLogger(__name__)

_BACKEND = "UCX"
_LOCAL = "NIXL_INIT_AGENT"


class _Memory(msgspec.Struct, frozen=True):
    agent: bytes
    address: int
    num_slots: int
    slot_bytes: int


@dataclass(slots=True)
class _Peer:
    agent: str
    slots: Any  # prepared descriptors, by slot
    open: dict[Reading, Any] = field(default_factory=dict)  # handles of the transfers that run
    failed: set[Reading] = field(default_factory=set)  # of them, those that failed and could not be cancelled yet


def import_nixl() -> ModuleType:
    """Return NIXL's module. Raises ImportError with its own reason."""
    return importlib.import_module("nixl._api")


class NixlTransport:
    """KvTransport over one NIXL agent. Life: made → used by the loop → close()."""

    def __init__(self, slots: np.ndarray) -> None:
        """slots: [num_slots, slot_bytes] uint8, host memory of the engine, its caller's until close().

        Raises ImportError without NIXL, RuntimeError if it cannot be used here.
        """
        nixl = import_nixl()
        self._agent = nixl.nixl_agent(
            f"quire-{os.getpid()}-{secrets.token_hex(4)}", nixl.nixl_agent_config(backends=[_BACKEND])
        )
        if _BACKEND not in self._agent.backends:
            raise RuntimeError(f"NIXL has no backend {_BACKEND} here")
        self._num_slots, self._slot_bytes = slots.shape
        self._address = slots.ctypes.data
        self._registered = self._agent.register_memory([(self._address, slots.nbytes, 0, "")], "DRAM")
        self._own = self._agent.prep_xfer_dlist(_LOCAL, self._descriptors(self._address, self._num_slots), "DRAM")
        self._peers: dict[int, _Peer] = {}
        self._leaving: list[_Peer] = []  # disconnected, with transfers that could not be cancelled
        self._done: list[Reading] = []

    @property
    def memory(self) -> bytes:
        """See KvTransport.memory."""
        agent = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(_Memory(agent, self._address, self._num_slots, self._slot_bytes))

    def connect(self, peer: int, memory: bytes) -> None:
        """See KvTransport.connect."""
        self.disconnect(peer)
        try:
            told = msgspec.msgpack.decode(memory, type=_Memory)
        except msgspec.MsgspecError as error:
            raise OSError(f"the peer's memory is not described as expected: {error}") from error
        if told.slot_bytes != self._slot_bytes:
            raise OSError(f"its slots have {told.slot_bytes} bytes and those here {self._slot_bytes}")
        try:
            agent = self._agent.add_remote_agent(told.agent)
            agent = agent.decode() if isinstance(agent, bytes) else agent
            slots = self._agent.prep_xfer_dlist(agent, self._descriptors(told.address, told.num_slots), "DRAM")
        except Exception as error:  # NIXL's errors have no common class
            raise OSError(f"NIXL: {error}") from error
        self._peers[peer] = _Peer(agent, slots)

    def disconnect(self, peer: int) -> None:
        """See KvTransport.disconnect."""
        gone = self._peers.pop(peer, None)
        if gone is not None:
            self._leaving.append(gone)
            self._leave()

    def read(self, peer: int, sources: list[int], targets: list[int]) -> Reading:
        """See KvTransport.read."""
        reading, source = Reading(peer, sources, targets), self._peers.get(peer)
        if source is None:
            self._end(reading, is_whole=False)
            return reading
        try:
            handle = self._agent.make_prepped_xfer(
                "READ", self._own, np.array(targets, np.int32), source.slots, np.array(sources, np.int32)
            )
            state = self._agent.transfer(handle)
        except Exception:
            logger.exception("blocks of a peer were not copied peer=%d", peer)
            self._end(reading, is_whole=False)
            return reading
        source.open[reading] = handle
        self._settle(source, reading, state)
        return reading

    def take_done(self) -> list[Reading]:
        """See KvTransport.take_done."""
        for peer in self._peers.values():
            for reading in list(peer.open):
                self._settle(peer, reading, self._state(peer, reading))
        if self._leaving:
            self._leave()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Give up access to all peers, and to the engine's own memory."""
        for peer in list(self._peers):
            self.disconnect(peer)
        self._own.release()
        self._agent.deregister_memory(self._registered)

    def _descriptors(self, address: int, num_slots: int) -> np.ndarray:
        table = np.empty((num_slots, 3), np.uint64)
        table[:, 0] = address + np.arange(num_slots, dtype=np.uint64) * np.uint64(self._slot_bytes)
        table[:, 1], table[:, 2] = self._slot_bytes, 0
        return table

    def _state(self, peer: _Peer, reading: Reading) -> str:
        """Return a transfer's state: DONE, PROC, ERR."""
        if reading in peer.failed:
            return "ERR"
        try:
            return self._agent.check_xfer_state(peer.open[reading])
        except Exception as error:  # the peer's process has ended, or its host is gone
            logger.warning("a peer was lost during a copy peer=%d error=%r", reading.peer, str(error))
            return "ERR"

    def _settle(self, peer: _Peer, reading: Reading, state: str) -> None:
        """Take back a transfer that has ended, one way or the other."""
        if state == "ERR" and reading not in peer.failed:
            logger.error("blocks of a peer were not copied peer=%d agent=%s", reading.peer, peer.agent)
            peer.failed.add(reading)
        if state in ("DONE", "ERR"):
            self._take_back(peer, reading, is_whole=state == "DONE")

    def _take_back(self, peer: _Peer, reading: Reading, *, is_whole: bool) -> None:
        """End a transfer. One that cannot be cancelled may still write: it keeps its targets, and is asked again."""
        try:
            peer.open[reading].release()
        except Exception:  # it runs
            return
        del peer.open[reading]
        peer.failed.discard(reading)
        self._end(reading, is_whole=is_whole)

    def _leave(self) -> None:
        """Cancel the transfers of disconnected peers. None is whole: its peer may have written its sources anew."""
        for peer in list(self._leaving):
            for reading in list(peer.open):
                state = self._state(peer, reading)
                if state == "ERR":
                    peer.failed.add(reading)
                self._take_back(peer, reading, is_whole=False)
            if not peer.open:
                self._leaving.remove(peer)
                for give_up in (peer.slots.release, functools.partial(self._agent.remove_remote_agent, peer.agent)):
                    try:
                        give_up()
                    except Exception as error:
                        logger.info("a peer's agent was gone already agent=%s error=%r", peer.agent, str(error))

    def _end(self, reading: Reading, *, is_whole: bool) -> None:
        reading.is_done, reading.is_whole = True, is_whole
        self._done.append(reading)
