"""Pinned blocks of a disk store outlast others until their time is over, also in the next process, within budgets."""

import errno
import os
import time

import pytest

from tests.unit.engine.tiers.opened_store import EACH, FaultyFolder, block, key

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
