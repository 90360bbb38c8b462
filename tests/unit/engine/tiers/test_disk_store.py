"""A disk store returns what was put or nothing, whatever happens to its folder; it is bounded and never raises."""

import errno
import fcntl
import os
import shutil
import stat
import threading

import pytest

from engine.tiers.block_file import header_of, name_of
from engine.tiers.block_folder import FOLDER_NAME, BlockFolder
from engine.tiers.disk_state import MAX_ERRORS, PAUSE_S
from tests.unit.engine.tiers.opened_store import EACH, IDENTITY, SIZE, FaultyFolder, Opened, block, key


def set_used(opened, number, at):
    os.utime(opened.file(number), ns=(at, at))


def test_blocks_survive_the_process(open_store):
    first = open_store()
    assert first.put(1, 2) == [True, True]
    assert not first.store.has(0, key(3))
    second = open_store()
    assert second.store.has(0, key(1))
    assert second.kept(range(4)) == [1, 2]
    assert second.get(1, size=SIZE + 1) is None
    assert second.store.status[:2] == (1, EACH), "a block of another size is damage"


def test_files_are_private_and_whole(open_store, tmp_path):
    opened = open_store()
    opened.put(1)
    assert stat.S_IMODE(opened.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in opened.path.iterdir()} == {0o600}
    assert sorted(file.suffix for file in opened.path.iterdir()) == ["", ".kv"]


def test_a_folder_that_others_may_read_becomes_private(tmp_path):
    (tmp_path / FOLDER_NAME).mkdir(mode=0o755)
    BlockFolder(tmp_path).close()
    assert stat.S_IMODE((tmp_path / FOLDER_NAME).stat().st_mode) == 0o700


def test_blocks_of_another_identity_are_not_found_and_leave_first(open_store):
    other = open_store(identity=bytes(32), num_blocks=3)
    other.put(1, 2, 3)
    opened = open_store(num_blocks=3)
    assert opened.kept(range(4)) == []
    opened.put(4)
    assert opened.kept([4]) == [4]
    assert opened.num_bytes() == 3 * EACH


DAMAGES = {
    "bit": lambda data: data[:3000] + bytes([data[3000] ^ 1]) + data[3001:],
    "bit of header": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "not written": lambda data: bytes(len(data)),
    "half written": lambda data: data[:2000] + bytes(len(data) - 2000),
    "foreign": lambda data: header_of(name_of(bytes(32), 0, key(1)), memoryview(block(1))) + block(1),
    "renamed": lambda data: header_of(name_of(IDENTITY, 0, key(2)), memoryview(block(2))) + block(2),
    "older": lambda data: data[:8] + bytes(4) + data[12:],
    "text": lambda data: b"hello" * 1000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_a_miss_and_deleted(open_store, damage):
    opened = open_store()
    opened.put(1)
    data = damage(opened.file(1).read_bytes())
    opened.file(1).write_bytes(data)
    assert opened.get(1) is None
    assert not opened.file(1).exists()
    assert opened.store.counts.num_damaged == 1
    assert opened.store.status.num_blocks == 0
    assert opened.put(1) == [True]
    assert opened.get(1) == block(1)


def test_links_pipes_and_folders_are_never_followed(open_store, tmp_path):
    opened = open_store()
    target = tmp_path / "target"
    opened.put(1)
    shutil.copy(opened.file(1), target)
    before = target.read_bytes()
    opened.file(1).unlink()
    opened.file(1).symlink_to(target)
    os.mkfifo(opened.file(2))
    opened.file(3).mkdir()
    assert open_store().store.status.num_blocks == 0
    assert opened.kept([1, 2, 3]) == []
    assert opened.put(1, 2, 3) == [True, True, False]
    assert opened.kept([1, 2, 3]) == [1, 2]
    assert target.read_bytes() == before


def test_files_of_others_are_left_alone(open_store):
    opened = open_store(num_blocks=1)
    for name in ("notes.txt", "x.kv", "x.tmp"):
        (opened.path / name).write_text("mine")
    opened.put(1, 2)
    opened.store.find_blocks()
    assert {"notes.txt", "x.kv", "x.tmp"} <= {file.name for file in opened.path.iterdir()}
    assert opened.kept([1, 2]) == [2]


def test_the_block_that_was_not_used_for_longest_leaves(open_store):
    opened = open_store(num_blocks=3)
    opened.put(1, 2, 3)
    opened.get(1)
    opened.put(2)  # again
    opened.put(4)
    assert opened.kept(range(5)) == [1, 2, 4]
    assert opened.store.counts.num_evicted == 1
    assert opened.store.status.num_bytes == opened.num_bytes() == 3 * EACH


def test_the_order_of_use_survives_the_process(open_store):
    opened = open_store()
    opened.put(1, 2, 3)
    for number, at in ((1, 3000), (2, 1000), (3, 2000)):
        set_used(opened, number, at)
    again = open_store(num_blocks=3)
    again.put(4)
    assert again.kept(range(5)) == [1, 3, 4]


def test_a_smaller_bound_is_met_at_the_next_start(open_store):
    open_store().put(*range(10))
    opened = open_store(num_blocks=4)
    assert opened.store.status[:2] == (4, 4 * EACH)
    assert opened.num_bytes() == 4 * EACH


def test_a_block_larger_than_the_bound_is_dropped(open_store):
    opened = open_store(num_blocks=1)
    assert not opened.store.put(0, key(1), bytes(EACH))
    assert opened.store.counts.num_dropped == 1


def test_a_removed_block_stays_removed(open_store):
    opened = open_store()
    opened.put(1, 2)
    opened.store.remove([(0, key(1))])
    opened.store.remove([(0, key(7))])
    assert opened.kept(range(3)) == [2]
    assert open_store().kept(range(3)) == [2]


def test_many_blocks_are_removed_with_one_wait_for_the_device(open_store, monkeypatch):
    opened, waits = open_store(), []
    opened.put(*range(10))
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (waits.append(file), fsync(file)))
    opened.store.remove([(0, key(number)) for number in range(9)])
    assert len(waits) == 1
    assert opened.kept(range(10)) == [9]
    opened.store.remove([(0, key(50))])
    assert len(waits) == 1, "nothing was deleted"


def test_a_removed_block_that_cannot_be_deleted_is_not_found_and_deleted_later(open_store):
    opened = open_store(folder=FaultyFolder)
    opened.put(1)
    opened.folder.fault, opened.folder.calls, opened.folder.times = errno.EIO, ("remove",), 2
    opened.store.remove([(0, key(1))])
    assert opened.get(1) is None
    assert opened.put(1) == [False], "the old file could be found again"
    opened.store.find_blocks()
    assert not opened.store.has(0, key(1))
    opened.put(2)
    opened.put(3)
    assert not opened.file(1).exists()
    assert opened.put(1) == [True]


def test_watched_blocks_that_leave_are_told_once_whoever_deletes_them(open_store):
    opened, other = open_store(num_blocks=4), open_store(num_blocks=4)
    opened.put(1, 2, 3, 4)
    assert [opened.store.watch(0, key(number)) for number in (1, 2, 3, 9)] == [True, True, True, False]
    opened.get(2)
    assert opened.store.take_lost() == [], "it has left its place for a moment"
    opened.put(5)  # evicts 1
    assert opened.store.take_lost() == [(0, key(1))]
    assert opened.store.take_lost() == []
    opened.store.remove([(0, key(2)), (0, key(4))])
    assert opened.store.take_lost() == [(0, key(2))], "4 was not watched"
    other.store.find_blocks()
    other.store.remove([(0, key(3))])
    assert opened.store.take_lost() == []
    opened.store.find_blocks()
    assert opened.store.take_lost() == [(0, key(3))]
    assert not opened.store.watch(0, key(3))
    assert opened.put(3) == [True]
    assert opened.store.watch(0, key(3))


def test_a_read_during_a_removal_finds_nothing(open_store):
    opened = open_store()
    opened.put(1)
    read = opened.folder.read

    def read_then_remove(name, out):
        used_ns = read(name, out)
        opened.store.remove([(0, key(1))])
        return used_ns

    opened.folder.read = read_then_remove
    assert opened.get(1) is None


ERRORS = [errno.EIO, errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.ESTALE]


@pytest.mark.parametrize("fault", ERRORS, ids=errno.errorcode.get)
def test_a_failing_disk_is_left_alone_for_a_while(open_store, fault):
    opened = open_store(folder=FaultyFolder)
    opened.put(1)
    opened.folder.fault = fault
    assert opened.put(*range(10, 10 + MAX_ERRORS)) == [False] * MAX_ERRORS
    assert opened.store.status.is_paused
    assert not opened.store.has(0, key(1))
    before = opened.store.counts.num_errors
    assert opened.put(50) == [False]
    assert opened.get(1) is None
    assert opened.store.counts.num_errors == before, "no call during a pause"
    opened.clock.now += PAUSE_S
    opened.put(51)
    assert opened.store.status.is_paused, "one error more is enough"
    opened.folder.fault = None
    opened.clock.now += PAUSE_S
    assert opened.put(52) == [True]
    assert not opened.store.status.is_paused
    assert opened.kept(range(60))[-1] == 52
    assert opened.store.counts.num_pauses == 2
    assert sorted(file.suffix for file in opened.path.iterdir() if file.suffix == ".tmp") == []


def test_an_error_while_reading_is_a_miss_and_the_file_stays(open_store):
    opened = open_store(folder=FaultyFolder)
    opened.put(1)
    opened.folder.fault, opened.folder.times = errno.EIO, 1
    assert opened.get(1) is None
    assert opened.get(1) == block(1)
    assert opened.store.counts.num_errors == 1


def test_a_full_disk_loses_the_oldest_blocks_first(open_store):
    opened = open_store(folder=FaultyFolder)
    opened.put(1, 2, 3)
    opened.folder.fault, opened.folder.times = errno.ENOSPC, 1
    assert opened.put(4) == [True]
    assert opened.kept(range(5)) == [2, 3, 4]
    assert opened.store.counts.num_errors == 0


def test_a_folder_that_cannot_be_listed_is_an_empty_one(tmp_path):
    class Unlisted(FaultyFolder):
        fault, calls = errno.EIO, ("scan",)

    opened = Opened(tmp_path, folder=Unlisted)
    assert opened.store.status.num_blocks == 0
    assert opened.store.counts.num_errors == 1
    opened.store.close()


def test_blocks_that_cannot_be_deleted_still_count(open_store):
    opened = open_store(folder=FaultyFolder, num_blocks=2)
    opened.put(1, 2)
    opened.folder.fault, opened.folder.calls = errno.EPERM, ("remove",)
    assert opened.put(3) == [False]
    assert opened.store.status[:2] == (2, 2 * EACH)


def test_a_folder_deleted_while_it_is_used_is_made_again(open_store):
    opened = open_store()
    opened.put(1, 2)
    shutil.rmtree(opened.path)
    assert opened.kept([1]) == []
    assert opened.put(3) == [True]
    assert opened.kept(range(4)) == [3]
    assert stat.S_IMODE(opened.path.stat().st_mode) == 0o700
    assert not opened.folder.is_shared()


def test_a_link_in_place_of_the_folder_is_not_followed(open_store, tmp_path):
    opened = open_store()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.rmtree(opened.path)
    opened.path.symlink_to(elsewhere)
    assert opened.put(1) == [False]
    assert list(elsewhere.iterdir()) == []


def test_a_file_that_a_scan_deletes_before_its_writer_has_locked_it_is_written_again(open_store, monkeypatch):
    opened, lock = open_store(), fcntl.flock
    num_deleted = 0

    def lock_late(file, operation):
        nonlocal num_deleted
        if operation == fcntl.LOCK_EX and num_deleted < 3:
            num_deleted += 1
            for temporary in opened.path.glob("*.tmp"):
                temporary.unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert opened.put(1) == [True]
    assert num_deleted == 3
    assert opened.get(1) == block(1)
    assert opened.store.counts.num_errors == 0


def test_leftovers_of_killed_writers_are_deleted_and_those_of_living_ones_stay(open_store):
    opened = open_store()
    left, file = opened.folder._new_temporary()
    os.close(file)
    living, file = opened.folder._new_temporary()
    open_store()
    names = {file.name for file in opened.path.iterdir()}
    os.close(file)
    assert left not in names
    assert living in names


def test_two_servers_share_blocks_and_the_bound(open_store):
    first, second = open_store(num_blocks=32), open_store(num_blocks=32)
    assert first.folder.is_shared()
    first.put(1)
    assert second.get(1) == block(1), "found without another look"
    assert second.store.has(0, key(1))
    for number in range(100, 200, 2):
        first.put(number)
        second.put(number + 1)
        assert first.num_bytes() <= 36 * EACH
    assert len(first.kept(range(100, 200))) >= 28


def test_a_block_that_another_server_used_is_not_the_oldest(open_store):
    first, second = open_store(num_blocks=3), open_store(num_blocks=3)
    first.put(1, 2, 3)
    for number in (1, 2, 3):
        set_used(first, number, number)
    first.store.find_blocks()
    second.get(1)
    first.put(4)
    assert first.kept(range(5)) == [1, 3, 4]


def test_a_block_that_another_server_deleted_is_a_miss(open_store):
    first, second = open_store(), open_store()
    first.put(1)
    second.store.find_blocks()
    first.store.remove([(0, key(1))])
    assert second.store.has(0, key(1)), "it does not know yet"
    assert second.get(1) is None
    assert not second.store.has(0, key(1))


def test_alone_again_a_server_knows_it(open_store, tmp_path):
    first, second = open_store(), Opened(tmp_path)
    assert first.folder.is_shared()
    second.store.close()
    assert not first.folder.is_shared()


def test_many_threads_on_two_stores_find_right_blocks_only(open_store):
    stores = [open_store(num_blocks=20), open_store(num_blocks=20)]
    wrong = []

    def work(opened, seed):
        for turn in range(60):
            number = (seed * 7 + turn * 13) % 40
            if turn % 3 == 0:
                opened.put(number)
            elif turn % 20 == 19:
                opened.store.remove([(0, key(number))])
            elif opened.get(number) not in (None, block(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(stores[i % 2], i)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for opened in stores:
        opened.store.find_blocks()
        assert opened.store.counts.num_errors == 0
        assert opened.store.status[:2] == (opened.num_bytes() // EACH, opened.num_bytes())
    assert stores[0].num_bytes() <= 26 * EACH
