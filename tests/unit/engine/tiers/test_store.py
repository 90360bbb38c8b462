"""What every store of blocks does; each of STORES is opened with room for three blocks of eight bytes."""

import pytest

from engine.tiers.block_folder import BlockFolder, bytes_on_disk
from engine.tiers.disk_store import DiskStore
from engine.tiers.store import BlockStore
from tests.support.fakes import MemoryStore

STORES = {
    "memory": lambda folder: MemoryStore(24),
    "disk": lambda folder: DiskStore(BlockFolder(folder), identity=bytes(32), size_bytes=3 * bytes_on_disk(8)),
}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    opened: BlockStore = STORES[request.param](tmp_path)
    yield opened
    opened.close()


def read(store, group, key, size=8):
    out = bytearray(size)
    return bytes(out) if store.get(group, key, memoryview(out)) else None


def test_a_block_is_found_by_group_and_key(store):
    assert store.put(0, b"a", b"00000000")
    assert store.put(1, b"a", memoryview(b"11111111"))
    assert [read(store, group, b"a") for group in (0, 1)] == [b"00000000", b"11111111"]
    assert store.has(1, b"a")
    assert not store.has(2, b"a")
    assert read(store, 0, b"b") is None


def test_it_takes_a_copy(store):
    data = bytearray(b"12345678")
    store.put(0, b"a", memoryview(data))
    data[:] = b"changed!"
    assert read(store, 0, b"a") == b"12345678"


def test_a_block_of_another_size_is_not_found(store):
    store.put(0, b"a", b"00000000")
    assert read(store, 0, b"a", size=16) is None


def test_a_removed_block_is_not_found(store):
    store.put(0, b"a", b"00000000")
    for _ in range(2):
        store.remove([(0, b"a")])
    assert not store.has(0, b"a")
    assert read(store, 0, b"a") is None


def test_it_is_bounded(store):
    for number in range(10):
        store.put(0, bytes([number]), bytes(8))
    assert sum(store.has(0, bytes([number])) for number in range(10)) <= 3
