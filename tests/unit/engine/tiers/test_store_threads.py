"""The threads of a store never let their caller wait, lose blocks rather than pile them up, and give memory back."""

import threading

import pytest

from engine.tiers import store_threads
from engine.tiers.block_folder import BlockFolder
from engine.tiers.disk_store import DiskStore
from engine.tiers.store_threads import StoreThreads
from tests.support.fakes import MemoryStore

LONG_S = 60.0  # a wait that ends much earlier


class GatedStore(MemoryStore):
    """A store whose calls wait until a test lets them go on."""

    def __init__(self):
        super().__init__(1 << 20)
        self.gate = threading.Semaphore(0)
        self.is_open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.log = []
        self.is_closed = False

    def _pass(self, *call):
        self.log.append(call)
        self.begun.release()
        if not self.is_open.is_set():
            assert self.gate.acquire(timeout=LONG_S)

    def put(self, group, key, data):
        self._pass("put", key)
        return super().put(group, key, data)

    def get(self, group, key, out):
        self._pass("get", key)
        return super().get(group, key, out)

    def remove(self, names):
        self._pass("remove", [key for _, key in names])
        super().remove(names)

    def close(self):
        self.is_closed = True


@pytest.fixture
def gated():
    store = GatedStore()
    done = threading.Semaphore(0)
    threads = StoreThreads(store, max_queued_bytes=30, num_readers=2, on_done=done.release)
    threads.done = done
    yield store, threads
    store.is_open.set()
    for _ in range(100):
        store.gate.release()
    threads.close(LONG_S)


def taken(threads, number=1):
    """Wait until `number` transfers are done, and take them back."""
    for _ in range(number):
        assert threads.done.acquire(timeout=LONG_S)
    transfers = threads.take_done()
    assert len(transfers) == number
    return transfers


def test_blocks_are_written_and_read_in_other_threads(gated):
    store, threads = gated
    store.is_open.set()
    written = threads.put(0, b"a", [memoryview(b"12345678")])
    assert taken(threads) == [written]
    assert written.is_kept
    assert threads.has(0, b"a")
    out = bytearray(8)
    read = threads.get(0, b"a", [memoryview(out)])
    assert taken(threads) == [read]
    assert read.is_kept
    assert out == b"12345678"
    missed = threads.get(1, b"a", [memoryview(out)])
    assert taken(threads) == [missed]
    assert not missed.is_kept


def test_blocks_of_several_parts_are_written_and_read(gated):
    store, threads = gated
    store.is_open.set()
    for number, block in enumerate((b"123456", b"789")):  # a smaller one after a larger one
        threads.put(0, bytes([number]), [memoryview(block[:2]), memoryview(block[2:])])
        taken(threads)
        assert store.has(0, bytes([number]))
        parts = [bytearray(1), bytearray(len(block) - 1)]
        threads.get(0, bytes([number]), [memoryview(part) for part in parts])
        assert taken(threads)[0].is_kept
        assert b"".join(parts) == block


def test_calls_that_a_disk_hangs_for_do_not_pile_up(gated, monkeypatch):
    monkeypatch.setattr(store_threads, "MAX_CALLED", 5)
    store, threads = gated
    threads.put(0, b"a", [memoryview(b"1")])
    called = []
    assert [threads.call(lambda: called.append(1), num_blocks=2) for _ in range(4)] == [True, True, False, False]
    assert threads.call(lambda: called.append(2), num_blocks=1)
    store.is_open.set()
    store.gate.release()
    taken(threads)
    threads.put(0, b"b", [memoryview(b"1")])
    taken(threads)  # behind the calls
    assert called == [1, 1, 2]
    assert threads.call(lambda: called.append(3), num_blocks=5)


def test_what_a_slow_disk_cannot_take_is_dropped_and_counted(gated):
    store, threads = gated
    transfers = [threads.put(0, bytes([number]), [memoryview(bytes(10))]) for number in range(5)]
    assert [transfer is not None for transfer in transfers] == [True, True, True, False, False]
    assert (threads.num_dropped, threads.dropped_bytes, threads.num_queued_bytes) == (2, 20, 30)
    store.gate.release()
    assert taken(threads) == transfers[:1]
    assert threads.num_queued_bytes == 20
    assert threads.put(0, b"z", [memoryview(bytes(10))]) is not None


def test_reads_overtake_writes(gated):
    store, threads = gated
    threads.put(0, b"a", [memoryview(bytes(10))])
    assert store.begun.acquire(timeout=LONG_S)
    read = threads.get(0, b"b", [memoryview(bytearray(8))])
    assert store.begun.acquire(timeout=LONG_S)
    assert store.log == [("put", b"a"), ("get", b"b")]
    assert threads.num_reads == 1
    store.gate.release(2)
    assert read in taken(threads, 2)
    assert threads.num_reads == 0


def test_a_cancelled_read_that_has_not_begun_is_not_made(gated):
    store, threads = gated
    reads = [threads.get(0, bytes([number]), [memoryview(bytearray(8))]) for number in range(3)]
    threads.cancel(reads[2])
    for _ in range(2):
        assert store.begun.acquire(timeout=LONG_S)
    store.gate.release(2)
    assert set(taken(threads, 3)) == set(reads)
    assert sorted(store.log) == [("get", b"\0"), ("get", b"\1")]


def test_a_removed_block_is_gone_at_once_and_removed_after_what_was_queued(gated):
    store, threads = gated
    MemoryStore.put(store, 0, b"a", b"old")
    read = threads.get(0, b"a", [memoryview(bytearray(3))])
    assert store.begun.acquire(timeout=LONG_S)
    threads.put(0, b"b", [memoryview(b"new")])
    assert store.begun.acquire(timeout=LONG_S)
    queued = threads.put(0, b"a", [memoryview(b"new")])
    threads.remove([(0, b"a")])
    assert not threads.has(0, b"a")
    late = threads.get(0, b"a", [memoryview(bytearray(3))])
    again = threads.put(0, b"a", [memoryview(b"new")])
    store.is_open.set()
    store.gate.release(4)
    transfers = []
    while len(transfers) < 5:
        transfers += threads.take_done()
    assert {transfer: transfer.is_kept for transfer in (read, queued, late, again)} == {
        read: False,
        queued: False,
        late: False,
        again: True,
    }
    assert store.log[2:] == [("remove", [b"a"]), ("put", b"a")]
    assert threads.has(0, b"a")


def test_blocks_are_removed_together_and_each_may_be_named_twice(gated):
    store, threads = gated
    names = [bytes([number]) for number in range(20)]
    for name in names:
        MemoryStore.put(store, 0, name, b"old")
    threads.remove([(0, name) for name in [*names[:15], *names[:3]]])
    assert [threads.has(0, name) for name in names] == [False] * 15 + [True] * 5
    threads.remove([(0, names[0]), (0, names[19])])  # the first once more, before it is gone
    assert not threads.has(0, names[19])
    store.is_open.set()
    store.gate.release(2)
    assert threads.close(LONG_S)
    assert store.log == [("remove", names[:15]), ("remove", [names[0], names[19]])]
    assert not threads._removing


def test_a_store_with_a_fault_costs_a_block_and_no_thread(gated, caplog):
    store, threads = gated
    store.is_open.set()
    store.get = None
    failed = threads.get(0, b"a", [memoryview(bytearray(8))])
    assert taken(threads) == [failed]
    assert not failed.is_kept
    assert "a store of blocks failed" in caplog.text
    del store.get
    threads.get(0, b"a", [memoryview(bytearray(8))])
    taken(threads)


def test_the_end_waits_for_what_is_queued(gated):
    store, threads = gated
    store.is_open.set()
    for number in range(3):
        threads.put(0, bytes([number]), [memoryview(bytes(10))])
    assert threads.close(LONG_S)
    assert store.is_closed
    assert all(store.has(0, bytes([number])) for number in range(3))
    assert threads.put(0, b"z", [memoryview(b"")]) is None


def test_the_end_does_not_wait_for_a_disk_that_hangs(gated):
    store, threads = gated
    threads.put(0, b"a", [memoryview(bytes(10))])
    reads = [threads.get(0, bytes([number]), [memoryview(bytearray(8))]) for number in range(4)]
    for _ in range(3):
        assert store.begun.acquire(timeout=LONG_S)
    assert not threads.close(0.01)
    assert not store.is_closed
    assert set(threads.take_done()) == set(reads) - {reads[0], reads[1]}


def test_a_disk_store_is_looked_through_before_the_first_block_is_written(tmp_path):
    first = DiskStore(BlockFolder(tmp_path), identity=bytes(32), size_bytes=1 << 20)
    first.put(0, b"a", b"12345678")
    first.close()
    store = DiskStore(BlockFolder(tmp_path), identity=bytes(32), size_bytes=1 << 20)
    done = threading.Event()
    threads = StoreThreads(store, max_queued_bytes=1 << 20, prepare=store.find_blocks, on_done=done.set)
    assert threads.put(0, b"b", [memoryview(b"87654321")]) is not None
    assert done.wait(LONG_S)
    assert store.status.num_blocks == 2
    assert threads.has(0, b"a")
    assert threads.close(LONG_S)
