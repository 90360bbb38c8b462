"""A disk store returns what was put or nothing, whatever happens to its folder; it is bounded and never raises."""

import contextlib
import errno
import os
import shutil
import stat
import threading
import time

import pytest

from engine.interface.errors import StartupError
from engine.tiers.block_file import HEADER_BYTES, header_of, name_of
from engine.tiers.block_folder import FOLDER_NAME, BlockFolder, bytes_on_disk, check_folder
from engine.tiers.disk_state import MAX_ERRORS, PAUSE_S
from engine.tiers.disk_store import DiskStore

IDENTITY = bytes(range(32))
SIZE = 5000
EACH = bytes_on_disk(SIZE)


def block(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(2, "little") * (size // 2)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Wall:
    """The clock of the host, which a test may set."""

    def __init__(self):
        self.now_ns = None

    def __call__(self):
        return time.time_ns() if self.now_ns is None else self.now_ns


class FaultyFolder(BlockFolder):
    """Raises an error of the device instead of doing some of its calls."""

    fault: int | None = None
    calls: tuple[str, ...] = ("_write_all", "_fill")
    times = 1 << 30

    def _fail(self, call):
        if self.fault is not None and call in self.calls and self.times:
            self.times -= 1
            raise OSError(self.fault, os.strerror(self.fault))

    def _write_all(self, file, data):
        if len(data) > HEADER_BYTES:
            os.write(file, bytes(data[:1000]))
            self._fail("_write_all")
            os.lseek(file, HEADER_BYTES, os.SEEK_SET)
        super()._write_all(file, data)

    def _fill(self, file, header, out):
        self._fail("_fill")
        return super()._fill(file, header, out)

    def set_time(self, name, used_ns):
        self._fail("set_time")
        super().set_time(name, used_ns)

    def remove(self, name):
        self._fail("remove")
        return super().remove(name)

    def scan(self, pause):
        self._fail("scan")
        return super().scan(pause)


class Opened:
    """A store with what a test wants to see of it."""

    def __init__(self, path, *, num_blocks=100, identity=IDENTITY, folder=BlockFolder):
        self.clock = Clock()
        self.path = path / FOLDER_NAME
        self.folder = folder(path)
        size = num_blocks * EACH
        self.wall = Wall()
        self.store = DiskStore(
            self.folder,
            identity=identity,
            size_bytes=size,
            pin_share=0.25,
            clock=self.clock,
            wall_ns=self.wall,
            sleep=lambda seconds: None,
        )
        self.store.find_blocks()

    def put(self, *numbers):
        return [self.store.put(0, key(number), block(number)) for number in numbers]

    def get(self, number, size=SIZE):
        out = bytearray(size)
        return bytes(out) if self.store.get(0, key(number), memoryview(out)) else None

    def kept(self, numbers):
        """The blocks that are there; each must be right."""
        found = {number: self.get(number) for number in numbers}
        assert all(data in (None, block(number)) for number, data in found.items())
        return [number for number, data in found.items() if data is not None]

    def file(self, number):
        return self.path / f"{name_of(IDENTITY, 0, key(number)).hex()}.kv"

    def num_bytes(self):
        return sum(bytes_on_disk(file.stat().st_size - HEADER_BYTES) for file in self.path.glob("*.kv"))


@pytest.fixture
def open_store(tmp_path):
    with contextlib.ExitStack() as stack:

        def open_one(**settings):
            opened = Opened(tmp_path, **settings)
            stack.callback(opened.store.close)
            return opened

        yield open_one


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


def test_a_new_folder_passes(tmp_path):
    check_folder(tmp_path / "a" / "b", size_bytes=2**20)
    assert stat.S_IMODE((tmp_path / "a" / "b" / FOLDER_NAME).stat().st_mode) == 0o700
    assert [file.name for file in (tmp_path / "a" / "b" / FOLDER_NAME).iterdir()] == ["lock"]


def test_a_size_beyond_the_disk_is_refused(tmp_path):
    with pytest.raises(StartupError, match=r"--kv-disk-size 1048576\.0 GiB is larger than the disk of .* GiB"):
        check_folder(tmp_path, size_bytes=2**50)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"--kv-disk .*file: the folder cannot be written: File exists"):
        check_folder(tmp_path / "file", size_bytes=1)
    with pytest.raises(StartupError, match=r"--kv-disk .*: the folder cannot be written: Not a directory"):
        check_folder(tmp_path / "file" / "x", size_bytes=1)


def test_a_link_in_place_of_its_own_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match=f"{FOLDER_NAME} is no folder"):
        check_folder(tmp_path, size_bytes=1)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    check_folder(tmp_path, size_bytes=1)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StartupError, match=rf"belongs to user {owner}, and this is user {owner + 1}"):
        check_folder(tmp_path, size_bytes=1)


@pytest.mark.parametrize("fault", [errno.EROFS, errno.EACCES, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch, fault):
    def refuse(self):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(BlockFolder, "try_out", refuse)
    with pytest.raises(StartupError, match=rf"--kv-disk .*: the folder cannot be written: {os.strerror(fault)}"):
        check_folder(tmp_path, size_bytes=1)


HOUR_S = 3600.0


def test_pinned_blocks_outlast_others_also_in_the_next_process(open_store):
    first = open_store(num_blocks=12)
    first.put(1, 2, 3)
    first.store.pin([(0, key(1)), (0, key(2)), (0, key(9))], owner="team", for_s=HOUR_S)
    assert first.store.status.num_pinned_bytes == 2 * EACH
    second = open_store(num_blocks=12)
    assert HOUR_S - 60 < second.store.pinned_for_s(0, key(1)) <= HOUR_S + 1
    assert second.store.pinned_for_s(0, key(3)) == second.store.pinned_for_s(0, key(9)) == 0
    assert second.get(1) == block(1), "a use leaves it pinned"
    second.put(*range(10, 30))
    assert second.kept((1, 2, 3)) == [1, 2]
    assert second.store.status.num_pinned_bytes == 2 * EACH
    assert second.num_bytes() <= 12 * EACH
    third = open_store(num_blocks=12)
    assert third.store.status.num_pinned_bytes == 2 * EACH


def test_a_pin_that_is_over_protects_nothing(open_store):
    opened = open_store(num_blocks=3)
    opened.put(1)
    opened.store.pin([(0, key(1))], owner="team", for_s=HOUR_S)
    opened.wall.now_ns = time.time_ns() + int(2 * HOUR_S) * 10**9
    opened.put(2, 3, 4, 5)
    assert opened.kept((1,)) == []
    assert opened.store.status.num_pinned_bytes == 0


def test_a_file_of_a_clock_far_ahead_is_one_that_is_used_now_and_can_be_pinned(open_store):
    opened = open_store(num_blocks=12)
    opened.put(1, 2, 3)
    for number in (1, 2, 3):
        os.utime(opened.file(number), (time.time() + 400 * HOUR_S,) * 2)
    again = open_store(num_blocks=12)
    assert again.store.status.num_pinned_bytes == 0
    again.store.pin([(0, key(1))], owner="team", for_s=HOUR_S)
    assert HOUR_S - 60 < again.store.pinned_for_s(0, key(1)) <= HOUR_S + 1
    assert again.get(2) == block(2)
    again.put(3)
    for number in (2, 3):
        assert again.file(number).stat().st_mtime <= time.time() + 1, "or it would outlive all others after a restart"


def test_pins_of_an_owner_stay_within_its_budget_over_restarts(open_store):
    first = open_store(num_blocks=12)  # a quarter for each owner, and a half for all
    first.put(*range(5))
    first.store.pin([(0, key(number)) for number in range(5)], owner="team", for_s=HOUR_S)
    assert [number for number in range(5) if first.store.pinned_for_s(0, key(number))] == [0, 1, 2], "the head"
    second = open_store(num_blocks=12)
    assert second.store.status.num_pinned_bytes == 3 * EACH
    assert [number for number in range(5) if second.store.pinned_for_s(0, key(number))] == [0, 1, 2], "the head again"
    second.put(*range(5, 9))
    for number in range(5, 9):
        second.store.pin([(0, key(number))], owner="team", for_s=HOUR_S)
    assert second.store.status.num_pinned_bytes == 3 * EACH
    for owner in ("other", "third"):
        second.store.pin([(0, key(number)) for number in range(3)], owner=owner, for_s=2 * HOUR_S)
    assert second.store.status.num_pinned_bytes <= 6 * EACH


def test_a_longer_pin_is_not_shortened_and_a_disk_that_fails_pins_nothing(open_store):
    opened = open_store(folder=FaultyFolder)
    opened.put(1)
    opened.store.pin([(0, key(1))], owner="team", for_s=2 * HOUR_S)
    opened.store.pin([(0, key(1))], owner="team", for_s=HOUR_S)
    assert opened.store.pinned_for_s(0, key(1)) > HOUR_S + 60
    opened.put(2)
    opened.folder.fault, opened.folder.calls = errno.EIO, ("set_time",)
    opened.store.pin([(0, key(2))], owner="team", for_s=HOUR_S)
    assert opened.store.pinned_for_s(0, key(2)) == 0
    assert opened.store.counts.num_errors == 1
    opened.folder.fault = None
    assert opened.kept((1, 2)) == [1, 2]


def test_pins_are_known_to_another_server_with_the_folder(open_store):
    first, second = open_store(num_blocks=6), open_store(num_blocks=6)
    first.put(1, 2)
    first.store.pin([(0, key(1))], owner="team", for_s=HOUR_S)
    second.store.find_blocks()
    second.put(*range(10, 30))
    assert second.kept((1, 2)) == [1]
    removed = [(0, key(1))]
    second.store.remove(removed)
    assert not second.store.has(*removed[0])
    assert second.store.status.num_pinned_bytes == 0


@pytest.mark.parametrize("call", ["_fill", "read"])
def test_a_pin_that_comes_while_the_block_is_read_stays(open_store, monkeypatch, call):
    opened = open_store(num_blocks=12)
    opened.put(1)
    real = getattr(opened.folder, call)

    def pinned_meanwhile(*arguments):
        result = real(*arguments)
        opened.store.pin([(0, key(1))], owner="team", for_s=HOUR_S)
        return result

    monkeypatch.setattr(opened.folder, call, pinned_meanwhile)
    assert opened.get(1) == block(1)
    assert opened.store.pinned_for_s(0, key(1)) > HOUR_S - 60
    assert open_store(num_blocks=12).store.pinned_for_s(0, key(1)) > HOUR_S - 60, "on disk, too"
