"""Slots are copied from one process's memory to another's, by shared memory and by NIXL where it is installed."""

import importlib.util
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from engine.peers.nixl import NixlTransport
from engine.peers.shared_memory import HAS_MEMFD, SharedMemory, SharedSlots

pytestmark = pytest.mark.skipif(not HAS_MEMFD, reason="needs memfd_create")
NUM_SLOTS, SLOT_BYTES = 24, 4096
OWNER = """
import sys
from engine.peers.nixl import NixlTransport
from engine.peers.shared_memory import SharedMemory, SharedSlots

slots = SharedSlots(num_slots=24, slot_bytes=4096)
for number in range(24):
    slots.array[number] = number + 1
transport = SharedMemory(slots) if sys.argv[1] == "shared-memory" else NixlTransport(slots.array)
print("memory", transport.memory.hex())
sys.stdout.flush()
sys.stdin.read()
"""
KINDS = [
    "shared-memory",
    pytest.param("nixl", marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL")),
]


@pytest.fixture
def slots():
    made = SharedSlots(num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES)
    yield made
    made.close()


def make(kind, slots):
    return SharedMemory(slots) if kind == "shared-memory" else NixlTransport(slots.array)


class Owner:
    """Another process with slots of its own, which are filled with their numbers and one."""

    def __init__(self, kind):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", OWNER, kind], stdin=pipe, stdout=pipe)
        line = b""
        while not line.startswith(b"memory "):  # NIXL writes lines of its own
            line = self.process.stdout.readline()
            assert line, "the owner ended"
        self.memory = bytes.fromhex(line.split()[1].decode())

    def kill(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture
def owner_of():
    owners = []

    def start(kind):
        owners.append(Owner(kind))
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()


def take(transport, count=1):
    done, end_s = [], time.monotonic() + 20
    while len(done) < count and time.monotonic() < end_s:
        done += transport.take_done()
    assert len(done) == count
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_copied_from_another_process(kind, slots, owner_of):
    transport = make(kind, slots)
    transport.connect(0, owner_of(kind).memory)
    slots.array[:] = 0
    first = transport.read(0, [3, 7, 8], [0, 20, 5])
    second = transport.read(0, [23], [1])
    assert set(take(transport, 2)) == {first, second}
    assert first.is_whole
    assert second.is_whole
    assert [int(slots.array[i, -1]) for i in (0, 20, 5, 1, 2)] == [4, 8, 9, 24, 0]
    assert all((slots.array[i] == slots.array[i, 0]).all() for i in range(NUM_SLOTS))
    transport.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_process_of_a_peer_takes_its_place(kind, slots, owner_of):
    transport = make(kind, slots)
    first = owner_of(kind)
    transport.connect(0, first.memory)
    transport.read(0, [1], [1])
    take(transport)
    first.kill()
    transport.disconnect(0)
    lost = transport.read(0, [2], [2])
    assert take(transport) == [lost]
    assert not lost.is_whole
    transport.connect(0, owner_of(kind).memory)
    transport.read(0, [2], [2])
    assert take(transport)[0].is_whole
    assert slots.array[2, 0] == 3
    transport.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [b"", b"{}", b"\x81\xa5wrong\x01"])
def test_a_wrong_description_is_an_error_of_the_system(kind, memory, slots):
    transport = make(kind, slots)
    with pytest.raises(OSError, match="not described"):
        transport.connect(0, memory)
    transport.close()


def test_memory_of_a_killed_process_stays_mapped_and_leaves_nothing_behind(slots, owner_of):
    transport, owner = SharedMemory(slots), owner_of("shared-memory")
    transport.connect(0, owner.memory)
    before = set(os.listdir("/dev/shm"))
    owner.kill()
    transport.read(0, [9], [9])
    assert take(transport)[0].is_whole
    assert slots.array[9, 0] == 10
    assert set(os.listdir("/dev/shm")) <= before
    with pytest.raises(OSError, match="No such file"):
        transport.connect(1, owner.memory)
    transport.close()


def test_slots_of_another_size_are_refused(slots):
    other = SharedSlots(num_slots=2, slot_bytes=512)
    transport = SharedMemory(slots)
    with pytest.raises(OSError, match="slots have 512 bytes and those here 4096"):
        transport.connect(0, SharedMemory(other).memory)
    transport.close()
    other.close()


def test_a_slot_that_does_not_exist_is_a_failed_copy(slots):
    transport = SharedMemory(slots)
    transport.connect(0, transport.memory)
    transport.read(0, [NUM_SLOTS], [0])
    assert not take(transport)[0].is_whole
    slots.array[1] = np.arange(SLOT_BYTES, dtype=np.uint8)
    transport.read(0, [1], [0])
    assert take(transport)[0].is_whole
    assert (slots.array[0] == slots.array[1]).all()
    transport.close()


class _LostAgent:
    """NIXL's agent, whose peer's process has ended: it tells so by an exception that has no class of its own."""

    backends = ("UCX",)
    is_busy = False

    def __init__(self, *_):
        self.released = 0

    def register_memory(self, regions, kind):
        return regions

    def prep_xfer_dlist(self, agent, descriptors, kind):
        return self

    def add_remote_agent(self, description):
        return "peer"

    def get_agent_metadata(self):
        return b"peer"

    def make_prepped_xfer(self, *_):
        return self

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    def remove_remote_agent(self, agent):
        raise RuntimeError("NIXL_ERR_NOT_FOUND")

    def release(self):
        if self.is_busy:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.released += 1


def test_a_copy_from_a_host_that_is_gone_ends_without_its_bytes(slots, monkeypatch):
    nixl = SimpleNamespace(nixl_agent=_LostAgent, nixl_agent_config=lambda backends: None)
    monkeypatch.setattr("engine.peers.nixl.import_nixl", lambda: nixl)
    transport = NixlTransport(slots.array)
    transport.connect(0, transport.memory)
    reading = transport.read(0, [1], [2])
    assert not reading.is_done
    assert transport.take_done() == [reading]
    assert (reading.is_done, reading.is_whole) == (True, False)
    assert transport.take_done() == []


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_failed_copy_that_cannot_be_cancelled_keeps_its_targets(is_connected, slots, monkeypatch, caplog):
    nixl = SimpleNamespace(nixl_agent=_LostAgent, nixl_agent_config=lambda backends: None)
    monkeypatch.setattr("engine.peers.nixl.import_nixl", lambda: nixl)
    transport = NixlTransport(slots.array)
    transport.connect(0, transport.memory)
    reading = transport.read(0, [1], [2])
    monkeypatch.setattr(_LostAgent, "is_busy", True)
    if not is_connected:
        transport.disconnect(0)
    assert transport.take_done() == transport.take_done() == []
    assert caplog.text.count("was lost during a copy") == 1
    monkeypatch.setattr(_LostAgent, "is_busy", False)
    assert transport.take_done() == [reading]
    assert (reading.is_done, reading.is_whole) == (True, False)
    assert transport.take_done() == []


def test_a_copy_that_ends_with_its_link_is_not_whole(slots, monkeypatch):
    nixl = SimpleNamespace(nixl_agent=_LostAgent, nixl_agent_config=lambda backends: None)
    monkeypatch.setattr("engine.peers.nixl.import_nixl", lambda: nixl)
    monkeypatch.setattr(_LostAgent, "check_xfer_state", lambda self, handle: "DONE")
    transport = NixlTransport(slots.array)
    transport.connect(0, transport.memory)
    reading = transport.read(0, [1], [2])
    transport.disconnect(0)  # the peer may have given its slots to other blocks since
    assert transport.take_done() == [reading]
    assert (reading.is_done, reading.is_whole) == (True, False)


def test_memory_of_another_host_is_not_mapped_by_chance(slots):
    transport = SharedMemory(slots)
    told = msgspec.json.decode(transport.memory)
    elsewhere = msgspec.json.encode(told | {"inode": told["inode"] + 1})
    with pytest.raises(OSError, match="not on this host, or in another container"):
        transport.connect(0, elsewhere)
    transport.connect(0, transport.memory)
    transport.close()
