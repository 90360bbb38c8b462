"""Each rank keeps the files of its share of a block; a block is found if all have theirs, whatever happens to files."""

import errno
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.tensor_parallel.disk_shares import OtherShares, ShareDone, ShareFiles, ShareJob
from engine.tiers.block_folder import FOLDER_NAME, BlockFolder, bytes_on_disk
from engine.tiers.disk_state import MAX_ERRORS
from engine.tiers.disk_store import DiskStore
from engine.tiers.store_threads import StoreThreads, Transfer

SLOT_BYTES = 600
NUM_RANKS = 3
EACH = bytes_on_disk(SLOT_BYTES)
LONG_S = 60.0
STEP = 5


class Memory:
    """A rank's slots of host memory."""

    def __init__(self, num_slots: int = 8) -> None:
        self._bytes = bytearray(num_slots * SLOT_BYTES)

    def slot(self, number: int) -> memoryview:
        return memoryview(self._bytes)[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]


class Ranks:
    """The ranks of a split model in one process, over one folder."""

    def __init__(self, folder: Path, *, size_blocks: int = 100) -> None:
        self.memories = [Memory() for _ in range(NUM_RANKS)]
        self.faults: dict[int, int] = {}  # by rank: what its disk answers instead
        self.num_faults = 1 << 30
        self.hanging: list[ShareJob] | None = None  # jobs of rank 1 that its disk does not end
        self.store = DiskStore(
            BlockFolder(folder),
            identity=bytes([0]) * 32,
            other_identities=[bytes([rank]) * 32 for rank in range(1, NUM_RANKS)],
            size_bytes=size_blocks * NUM_RANKS * EACH,
        )
        self.shares = OtherShares(self.store, self._tell, num_ranks=NUM_RANKS, committed_step=lambda: STEP)
        self._files = [
            ShareFiles(folder, memory.slot, lambda done, rank=rank: self.shares.take(rank, done))  # type: ignore[misc]
            for rank, memory in enumerate(self.memories)
        ]
        self.threads = StoreThreads(
            self.store,
            max_queued_bytes=1 << 20,
            prepare=self.store.find_blocks,
            shares=self.shares,
        )
        while not self.threads.is_ready:
            time.sleep(0)

    def _tell(self, rank: int, job: ShareJob) -> None:
        assert job.after_step == STEP
        if rank == 1 and self.hanging is not None:
            self.hanging.append(job)
        elif rank in self.faults and self.num_faults:
            self.num_faults -= 1
            self.shares.take(rank, ShareDone(job.job_id, fault=self.faults[rank]))
        else:
            self._files[rank].begin(job)

    def end(self, transfer: Transfer | None) -> bool:
        """Wait for a transfer, and return whether it is kept."""
        until_s = time.monotonic() + LONG_S
        while not (done := self.threads.take_done()):
            assert time.monotonic() < until_s
            time.sleep(0)
        assert done == [transfer]
        return done[0].is_kept

    def fill(self, number: int, slots: list[int]) -> None:
        for rank, memory in enumerate(self.memories):
            for place, slot in enumerate(slots):
                memory.slot(slot)[:] = bytes([number % 251, rank, place]) * (SLOT_BYTES // 3)

    def holds(self, number: int, slots: list[int]) -> bool:
        return all(
            memory.slot(slot) == bytes([number % 251, rank, place]) * (SLOT_BYTES // 3)
            for rank, memory in enumerate(self.memories)
            for place, slot in enumerate(slots)
        )

    def put(self, number: int, slots: list[int]) -> bool:
        self.fill(number, slots)
        parts = [self.memories[0].slot(slot) for slot in slots]
        return self.end(self.threads.put(0, key(number), parts, slots=slots))

    def get(self, number: int, slots: list[int]) -> bool:
        self.fill(250, slots)
        parts = [self.memories[0].slot(slot) for slot in slots]
        return self.end(self.threads.get(0, key(number), parts, slots=slots))

    def has(self, number: int) -> bool:
        return self.threads.has(0, key(number))

    def file(self, number: int, rank: int) -> Path:
        return Path(self.store._folder._path) / f"{self.store.names(0, key(number))[rank].hex()}.kv"

    def close(self) -> None:
        assert self.threads.close(LONG_S)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_blocks_of_several_pages_come_back_in_the_next_process(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.put(1, [3])
    assert ranks.put(2, [5, 0, 6])
    assert ranks.store.status.num_blocks == 2 * NUM_RANKS
    again = Ranks(tmp_path)
    assert again.has(1)
    assert again.has(2)
    assert again.get(2, [1, 7, 2])
    assert again.holds(2, [1, 7, 2])
    assert again.get(1, [0])
    assert again.holds(1, [0])
    assert not again.get(3, [0])
    again.close()


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_share_that_is_damaged_is_a_miss_for_all_and_can_be_written_again(
    ranks: Ranks, rank: int, damage: str
) -> None:
    ranks.put(1, [0, 1])
    file = ranks.file(1, rank)
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        content[200] ^= 1
        file.write_bytes(content)
    assert not ranks.get(1, [2, 3])
    assert not ranks.has(1)
    assert not file.exists()
    assert ranks.store.counts.num_damaged == (damage != "gone")
    assert ranks.put(1, [0, 1])
    assert ranks.get(1, [4, 5])
    assert ranks.holds(1, [4, 5])


def test_a_share_that_cannot_be_written_is_no_block_until_it_is(ranks: Ranks) -> None:
    ranks.faults[2] = errno.EIO
    assert not ranks.put(1, [0])
    assert not ranks.has(1)
    assert ranks.store.counts.num_errors == 1
    ranks.faults.clear()
    assert ranks.put(1, [0])
    assert ranks.get(1, [1])
    assert ranks.holds(1, [1])


def test_a_disk_that_fails_for_one_rank_is_left_alone_by_all(ranks: Ranks) -> None:
    ranks.put(0, [0])
    ranks.faults[1] = errno.EIO
    for number in range(1, 1 + MAX_ERRORS):
        assert ranks.has(0)
        assert not ranks.put(number, [0])
    assert ranks.store.status.is_paused
    assert not ranks.has(0)
    assert not ranks.get(0, [1])
    assert ranks.store.counts.num_errors == MAX_ERRORS


def test_a_disk_that_is_full_for_one_rank_loses_the_oldest_blocks(ranks: Ranks) -> None:
    for number in range(4):
        assert ranks.put(number, [0])
    ranks.faults[2], ranks.num_faults = errno.ENOSPC, 1
    assert ranks.put(4, [0])
    assert not ranks.has(0)
    assert ranks.has(3)
    assert ranks.get(4, [1])
    assert ranks.holds(4, [1])


def test_the_bound_holds_for_all_ranks_together(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, size_blocks=3)
    for number in range(10):
        assert ranks.put(number, [0])
        files = list((tmp_path / FOLDER_NAME).glob("*.kv"))
        assert sum(bytes_on_disk(SLOT_BYTES) for _ in files) <= 3 * NUM_RANKS * EACH
    assert [number for number in range(10) if ranks.has(number)] == [7, 8, 9]
    assert not ranks.store._looks.was_shared, "the other ranks are of this server"
    ranks.close()


def test_a_disk_that_hangs_for_one_rank_keeps_the_slots_of_all_and_blocks_no_caller(ranks: Ranks) -> None:
    ranks.put(1, [0])
    ranks.hanging = []
    ranks.fill(250, [2])
    transfer = ranks.threads.get(0, key(1), [ranks.memories[0].slot(2)], slots=[2])
    until_s = time.monotonic() + LONG_S
    while not ranks.hanging and time.monotonic() < until_s:
        time.sleep(0.001)
    ranks.threads.cancel(transfer)
    assert ranks.threads.take_done() == [], "its slots are still in use"
    assert not ranks.threads.close(0.05)
    (job,) = ranks.hanging
    ranks.hanging = None
    ranks._files[1].begin(job)
    assert not ranks.end(transfer), "nobody wants it"
    assert ranks.holds(1, [2])


def test_removed_blocks_leave_no_file_of_any_rank(ranks: Ranks) -> None:
    ranks.put(1, [0])
    ranks.put(2, [0])
    ranks.threads.remove([(0, key(1))])
    assert not ranks.has(1)
    assert ranks.put(3, [0])  # behind the removal
    assert not any(ranks.file(1, rank).exists() for rank in range(NUM_RANKS))
    assert all(ranks.file(2, rank).exists() for rank in range(NUM_RANKS))


def test_a_watched_block_is_lost_with_its_first_share(ranks: Ranks) -> None:
    ranks.put(1, [0])
    assert ranks.store.watch(0, key(1))
    assert ranks.store.take_lost() == []
    ranks.file(1, 2).unlink()
    assert not ranks.get(1, [0])
    assert ranks.store.take_lost() == [(0, key(1))]
    assert not ranks.store.watch(0, key(1))
    ranks.put(1, [0])
    assert ranks.store.watch(0, key(1))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_a_block_is_what_was_put_or_missing(tmp_path: Path, seed: int) -> None:
    draw, num_hits = random.Random(seed), 0
    ranks = Ranks(tmp_path, size_blocks=12)
    for _ in range(200):
        number, slots = draw.randrange(20), draw.sample(range(8), draw.choice((1, 2)))
        slots = slots[: 1 + number % 2] if len(slots) > number % 2 else [0, 1]
        event = draw.random()
        if event < 0.4:
            ranks.put(number, slots)
        elif event < 0.8:
            if ranks.get(number, slots):
                assert ranks.holds(number, slots)
                num_hits += 1
        elif event < 0.85:
            ranks.threads.remove([(0, key(number))])
        elif event < 0.9:
            files = sorted((tmp_path / FOLDER_NAME).glob("*.kv"))
            if files:
                file = draw.choice(files)
                file.write_bytes(draw.randbytes(draw.choice((0, 50, 128 + SLOT_BYTES))))
        elif event < 0.95:
            ranks.faults = {draw.randrange(1, NUM_RANKS): draw.choice((errno.EIO, errno.ENOSPC))}
            ranks.num_faults = draw.randrange(1, 4)
        else:
            ranks.close()
            ranks = Ranks(tmp_path, size_blocks=12)
    assert num_hits > 5
    ranks.close()
