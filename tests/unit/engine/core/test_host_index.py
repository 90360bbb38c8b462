"""Slots of host memory: found by name, evicted in order, never while a copy reads them."""

import random

from engine.core.host_index import HostIndex


def stored(index, name, count=1):
    slots = index.take(count)
    index.add((0, name), slots)
    return slots


def test_a_block_is_found_once_it_is_added():
    index = HostIndex(num_slots=4)
    slots = index.take(2)
    assert slots == [0, 1]
    index.check(slots)
    assert index.find((0, b"a")) is None
    index.add((0, b"a"), slots)
    assert index.find((0, b"a")).slots == [0, 1]
    assert index.find((1, b"a")) is None
    assert (index.num_blocks, index.num_used) == (1, 2)


def test_the_least_recently_used_block_goes_first():
    index = HostIndex(num_slots=3)
    for name in (b"a", b"b", b"c"):
        stored(index, name)
    assert index.touch((0, b"a"))
    assert not index.touch((0, b"d"))
    stored(index, b"d", 2)
    assert [index.find((0, name)) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, False, True]
    assert index.num_evictions == 2
    index.check([])


def test_slots_that_a_copy_reads_are_not_taken():
    index = HostIndex(num_slots=2)
    stored(index, b"a")
    stored(index, b"b")
    block = index.find((0, b"a"))
    index.begin_reading(block)
    assert index.take(2) is None
    assert index.find((0, b"b")) is not None
    assert index.take(1) == [1]
    index.check([1])
    index.end_reading(block)
    assert index.take(1) == [0]


def test_a_forgotten_block_is_not_found_and_its_slots_are_freed_after_the_last_copy():
    index = HostIndex(num_slots=1)
    stored(index, b"a")
    block = index.find((0, b"a"))
    index.begin_reading(block)
    index.forget((0, b"a"))
    index.forget((0, b"a"))
    assert index.find((0, b"a")) is None
    assert block.is_forgotten
    assert index.take(1) is None
    index.check([])
    index.end_reading(block)
    assert index.take(1) == [0]


def test_slots_that_are_not_ready_are_not_taken():
    index = HostIndex(num_slots=6)
    index.set_ready(2, is_growing=True)
    assert index.take(3) is None
    assert index.take(2) == [0, 1]
    index.check([0, 1])
    num_freed = index.num_freed
    index.set_ready(5, is_growing=True)
    assert index.num_freed > num_freed
    assert index.take(3) == [2, 3, 4]
    assert (index.num_ready, index.num_used, index.num_slots) == (5, 5, 6)
    index.set_ready(9, is_growing=False)
    assert (index.num_ready, index.num_slots) == (6, 6)
    index.check([0, 1, 2, 3, 4])


def test_slots_that_never_become_ready_are_none():
    index = HostIndex(num_slots=6)
    index.set_ready(1, is_growing=True)
    index.set_ready(2, is_growing=False)
    assert (index.num_ready, index.num_slots) == (2, 2)


def test_no_slot_is_lost_or_used_twice():
    rng = random.Random(0)
    index, taken, read = HostIndex(num_slots=20), [], []
    index.set_ready(3, is_growing=True)
    for number in range(3000):
        match rng.choice([0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 6, 7]):
            case 0:
                slots = index.take(rng.randint(1, 4))
                if slots is not None:
                    taken.append(slots)
            case 1 if taken:
                index.add((0, b"%d" % number), taken.pop())
            case 2 if taken:
                index.give_back(taken.pop())
            case 3 if index.num_blocks:
                block = index.find(rng.choice(index.names()))
                index.begin_reading(block)
                read.append(block)
            case 4 if read:
                index.end_reading(read.pop(rng.randrange(len(read))))
            case 5 if index.num_blocks:
                index.forget(rng.choice(index.names()))
            case 6:
                index.pin((0, b"%d" % rng.randint(max(number - 20, 0), number + 5)))
            case 7 if index._pinned:
                index.unpin(rng.choice(sorted(index._pinned)))
        if number % 100 == 0:
            index.set_ready(index.num_ready + 1, is_growing=number < 2900)
        index.check([slot for slots in taken for slot in slots])
    assert index.num_ready == 20
    assert index.num_evictions > 20


def filled(*names, num_slots=3):
    index = HostIndex(num_slots=num_slots)
    for name in names:
        index.add((0, name), index.take(1))
    return index


def test_pinned_blocks_leave_after_all_others_and_among_themselves_by_use():
    index = filled(b"a", b"b", b"c")
    index.pin((0, b"a"))
    index.pin((0, b"b"))
    index.pin((0, b"a"))
    index.touch((0, b"a"))
    left = []
    for _ in range(3):
        before = index.names()
        index.take(1)
        left += [name for name in before if name not in index.names()]
    assert left == [(0, b"c"), (0, b"b"), (0, b"a")]


def test_a_block_that_is_pinned_before_it_comes_is_pinned_when_it_does():
    index = HostIndex(num_slots=2)
    index.pin((0, b"a"))
    index.add((0, b"a"), index.take(1))
    index.add((0, b"b"), index.take(1))
    taken = index.take(1)
    assert index.names() == [(0, b"a")]
    index.unpin((0, b"a"))
    index.check(taken)


def test_a_block_that_is_unpinned_leaves_before_those_that_were_used_later():
    index = filled(b"a", b"b", b"c")
    index.pin((0, b"b"))
    index.unpin((0, b"b"))
    index.take(1)
    assert index.names() == [(0, b"a"), (0, b"c")]
