"""A process that writes to a disk store is killed at any moment; whoever opens the folder next finds right blocks."""

import random
import signal
import subprocess
import sys
import time

import pytest

from engine.tiers.block_folder import FOLDER_NAME, BlockFolder
from engine.tiers.disk_store import DiskStore
from tests.unit.engine.tiers.numbered_blocks import IDENTITY, NUM_BYTES, block_of, is_removed, key_of, size_of

MOST_NUMBERS = 4000  # that one process writes


def kill_while_writing(folder, first, delay_s):
    """Start a writer, and kill it some time after its first block may be there."""
    command = [sys.executable, "-m", "tests.unit.engine.tiers.writer_process", str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def find_all(folder, num_turns):
    """Open the folder as a new server; return how many blocks it has, each of which must be right."""
    store = DiskStore(BlockFolder(folder), identity=IDENTITY, size_bytes=NUM_BYTES)
    store.find_blocks()
    known = [number for number in range(num_turns * MOST_NUMBERS) if store.has(0, key_of(number))]
    assert len(known) == store.status.num_blocks
    assert store.status.num_bytes <= NUM_BYTES
    for number in known:
        out = bytearray(size_of(number))
        assert store.get(0, key_of(number), memoryview(out))
        assert out == block_of(number)
    store.close()
    assert store.counts.num_damaged == store.counts.num_errors == 0
    removed = [number // MOST_NUMBERS for number in known if is_removed(number)]
    assert len(removed) == len(set(removed)), "only the block that was being removed may be there"
    return len(known)


def kill_often(folder, times, seed):
    random_delays = random.Random(seed)
    num_found = 0
    for turn in range(times):
        first = turn * MOST_NUMBERS
        kill_while_writing(folder, first, random_delays.uniform(0.0, 0.1))
        num_found += find_all(folder, turn + 1)
        names = [file.name for file in (folder / FOLDER_NAME).iterdir()]
        assert [name for name in names if not name.endswith(".kv")] == ["lock"]
    assert num_found > 0


def test_a_writer_that_is_killed_leaves_right_blocks_and_nothing_else(tmp_path):
    kill_often(tmp_path, 3, seed=1)


@pytest.mark.full
def test_a_writer_that_is_killed_often_leaves_right_blocks_and_nothing_else(tmp_path):
    kill_often(tmp_path, 50, seed=2)
