"""Blocks go through host memory to a disk and come back, also to another engine; a disk that hangs stops nothing."""

from random import Random

import pytest

from engine.core.disk_tier import STALL_S
from engine.tiers.disk_state import DiskStatus
from tests.support.fake_disk import FakeDisk
from tests.support.layered_harness import GROUPS, NUM_PAGES, PROMPT, host_harness


def with_disk(kind="full", *, blocks=None, num_slots=200, **settings):
    harness = host_harness(groups=GROUPS[kind], num_pages=NUM_PAGES[kind], num_slots=num_slots, **settings)
    return harness, FakeDisk(harness, blocks)


def answer(harness, name, prompt, max_tokens=4):
    harness.add(name, prompt, max_tokens)
    harness.drain()
    return harness.seen[name]


def settle(harness, disk):
    """Turn until the disk has done everything."""
    while disk.num_queued:
        harness.turn()


def restarted(kind="full", *, prompt=PROMPT, **settings):
    """Return an engine after the end of one that has answered a prompt, its disk, and the next turn's prompt."""
    harness, disk = with_disk(kind, **settings)
    first = answer(harness, "first", prompt)
    settle(harness, disk)
    assert disk.blocks
    harness, disk = with_disk(kind, blocks=disk.blocks, **settings)
    return harness, disk, [*prompt, *first.token_ids, 7, 8, 9]


def _answered(prompt):
    """Return the disk of an engine that has answered a prompt."""
    harness, disk = with_disk()
    answer(harness, "only", prompt)
    settle(harness, disk)
    return disk


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", GROUPS)
def test_the_next_turn_after_a_restart_is_found(kind, depth):
    harness, disk, prompt = restarted(kind, depth=depth)
    assert answer(harness, "again", prompt).num_cached_tokens >= 16
    tier = harness.scheduler.kv.tiers.disk
    assert tier.num_read == len(disk.log) > 0
    assert tier.waited_s > 0
    settle(harness, disk)
    assert tier.num_failed == 0


def test_an_answer_tells_what_came_from_the_disk_and_what_from_host_memory_alone():
    harness, disk, prompt = restarted()
    reports = {}
    send = harness.transport.send

    def note(client, message):
        for started in getattr(message, "started", []):
            reports[len(reports)] = started.cache
        send(client, message)

    harness.transport.send = note
    answer(harness, "again", prompt)
    for number in range(4):
        answer(harness, f"other {number}", [30 + number] * 28)
    answer(harness, "once more", prompt)
    first, *_, last = reports.values()
    assert first.num_disk_tokens == first.num_host_tokens == first.num_cached_tokens >= 16
    assert (last.num_disk_tokens, last.num_host_tokens) == (0, last.num_cached_tokens)
    assert last.num_cached_tokens >= 16
    tiers = harness.scheduler.kv.tiers
    assert tiers.disk.num_found_tokens == first.num_disk_tokens
    settle(harness, disk)


def test_blocks_are_written_once():
    harness, disk, prompt = restarted()
    answer(harness, "again", prompt)
    settle(harness, disk)
    written = harness.scheduler.kv.tiers.disk.num_written
    assert 0 < written < len(disk.blocks)
    answer(harness, "once more", prompt)
    settle(harness, disk)
    assert harness.scheduler.kv.tiers.disk.num_written == written


def test_others_run_while_a_request_waits_for_the_disk():
    harness, disk, prompt = restarted()
    disk.polls_until_done = 30
    harness.add("again", prompt, 4)
    harness.turn()
    assert harness.scheduler.kv.tiers.num_outside == 1
    harness.add("other", [30, 31, 32], 4)
    harness.turn(12)
    assert harness.seen["other"].ends == ["length"]
    assert harness.scheduler.kv.tiers.num_outside == 1
    harness.drain()
    assert harness.seen["again"].num_cached_tokens >= 16


def test_two_requests_for_one_block_read_it_once():
    harness, disk, prompt = restarted()
    disk.polls_until_done = 5
    harness.add("a", prompt, 4)
    harness.add("b", [*prompt, 1], 4)
    harness.drain()
    assert len(disk.log) == len(set(disk.log)) > 0
    assert min(harness.seen[name].num_cached_tokens for name in "ab") >= 16


@pytest.mark.parametrize("lost", [0, 2, -1])
def test_a_block_that_is_lost_is_computed(lost):
    harness, disk, prompt = restarted()
    names = list(disk.blocks)
    disk.loses = lambda name: name == names[lost]
    answer(harness, "again", prompt)
    assert harness.scheduler.kv.tiers.disk.num_failed <= 1


def test_a_disk_that_hangs_costs_a_wait_and_no_request():
    harness, disk, prompt = restarted()
    disk.is_hanging = True
    harness.add("again", prompt, 4)
    harness.turn(3)
    assert harness.scheduler.kv.tiers.num_outside == 1
    harness.clock.now += STALL_S
    harness.turn(20)
    assert harness.seen["again"].ends == ["length"]
    assert harness.seen["again"].num_cached_tokens == 0
    assert len(harness.scheduler.kv.tiers.disk.slots) > 0, "its slots stay while a read may write to them"
    disk.is_hanging = False
    harness.turn()
    assert harness.scheduler.kv.tiers.disk.slots == []
    harness.drain()


def test_after_a_stall_no_request_waits_until_something_has_come_back():
    harness, disk, prompt = restarted()
    disk.is_hanging = True
    harness.add("first", prompt, 4)
    harness.turn(3)
    harness.clock.now += STALL_S
    harness.turn(20)
    taken = len(harness.scheduler.kv.tiers.disk.slots)
    harness.add("second", [*prompt[:12], 1, 2, 3, 4], 4)
    harness.turn()
    assert harness.scheduler.kv.tiers.num_outside == 0
    assert len(harness.scheduler.kv.tiers.disk.slots) == taken
    disk.is_hanging = False
    harness.drain()
    assert harness.seen["second"].ends == ["length"]


def test_a_request_that_ends_while_it_waits_leaves_nothing():
    harness, disk, prompt = restarted()
    disk.polls_until_done = 10
    harness.add("again", prompt, 4)
    harness.turn()
    harness.abort("again")
    harness.turn()
    assert harness.scheduler.kv.tiers.num_outside == 0
    harness.drain()
    settle(harness, disk)
    assert harness.scheduler.kv.tiers.disk.slots == []
    assert harness.scheduler.kv.tiers.disk.num_read == 0


def test_blocks_that_the_disk_does_not_take_are_dropped():
    harness, disk = with_disk()
    disk.refuses = lambda name: len(disk.blocks) + disk.num_queued >= 2
    answer(harness, "first", PROMPT)
    settle(harness, disk)
    assert len(disk.blocks) == 2
    assert harness.scheduler.kv.tiers.disk.num_unwritten >= 1


def test_slots_of_blocks_that_are_written_stay():
    harness, disk = with_disk(num_slots=8)
    disk.is_hanging = True
    disk.refuses = lambda name: disk.num_queued >= 1
    for number in range(6):
        answer(harness, str(number), [number + 10] * 20)
    assert harness.scheduler.kv.tiers.disk.num_written == 0
    disk.is_hanging = False
    settle(harness, disk)
    again, _ = with_disk(blocks=disk.blocks)
    answer(again, "again", [*[10] * 20, 1, 2, 3])


def test_a_disk_that_hangs_lets_the_engine_be_idle_and_the_rest_is_copied_afterwards():
    harness, disk = with_disk(num_slots=8)
    disk.is_hanging = True
    for number in range(6):
        harness.add(str(number), [number + 10] * 20, 4)
    for _ in range(200):
        harness.turn()
    tier = harness.scheduler.kv.tiers.host
    assert harness.engine.is_idle, "it turns for copies that find no slots"
    assert tier.index.num_used == 8
    num_stored = tier.num_stored
    disk.is_hanging = False
    harness.turn(2)
    assert not harness.engine.is_idle
    harness.drain()
    settle(harness, disk)
    assert tier.num_stored > num_stored


def test_a_request_behind_many_reads_is_computed():
    harness, disk, prompt = restarted(page_s=0.0001, token_s=0.01)
    other = [*prompt[:8], *[21] * 12]
    disk.blocks |= _answered(other).blocks
    disk.counts.read_s, disk.counts.read_bytes = 0.03, 1  # 4 tokens take 0.04 s
    disk.polls_until_done = 50
    harness.add("first", prompt, 4)
    harness.turn(2)
    num_reads = len(disk.log)
    assert num_reads >= 4
    harness.add("second", other, 4)
    harness.turn(2)
    tier = harness.scheduler.kv.tiers.disk
    assert (len(disk.log), tier.num_too_costly) == (num_reads, 1)
    harness.drain()
    settle(harness, disk)


def test_more_than_host_memory_holds_is_computed():
    harness, disk, prompt = restarted()
    harness, disk = with_disk(blocks=disk.blocks, num_slots=8)
    assert answer(harness, "again", prompt).num_cached_tokens == 0
    assert disk.log == []
    assert harness.scheduler.kv.tiers.disk.num_too_costly == 1


def test_reading_that_takes_longer_than_computing_is_not_done():
    harness, disk, prompt = restarted(page_s=0.001, token_s=0.01)
    disk.counts.read_s, disk.counts.read_bytes = 1.0, 1
    assert answer(harness, "again", prompt).num_cached_tokens == 0
    assert disk.log == []


def test_blocks_with_values_that_are_not_finite_leave_the_disk():
    harness, disk = with_disk()
    answer(harness, "first", PROMPT)
    settle(harness, disk)
    kv = harness.scheduler.kv
    kv.tiers.forget(list(disk.blocks))
    assert disk.blocks == {}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", GROUPS)
def test_random_turns_of_several_engines_on_one_disk_have_right_tokens(kind, seed):
    """The harness compares every token; the disk is slow, loses and refuses blocks, and survives the engines."""

    rng, blocks = Random(seed), {}
    turns = [[rng.randrange(40)] * 8 for _ in range(4)]
    num_cached = 0
    for _ in range(3):
        harness, disk = with_disk(kind, blocks=blocks, num_slots=rng.choice([24, 60, 200]), depth=rng.choice([1, 2]))
        disk.polls_until_done = rng.choice([1, 3, 9])
        disk.loses = lambda name: rng.random() < 0.1
        disk.refuses = lambda name: rng.random() < 0.2
        for number in range(8):
            at = rng.randrange(len(turns))
            if len(turns[at]) > 34:
                turns[at] = turns[at][:8]
            turns[at] = turns[at] + [rng.randrange(40) for _ in range(rng.randrange(1, 6))]
            harness.add(str(number), turns[at], rng.randrange(1, 5))
            harness.turn(rng.randrange(12))
        harness.drain()
        num_cached += sum(seen.num_cached_tokens for seen in harness.seen.values())
        if rng.random() < 0.5:
            settle(harness, disk)
    assert num_cached > 0


def test_the_metrics_of_a_disk_are_those_of_its_store_and_of_requests():
    harness, disk, prompt = restarted()
    disk.counts.num_errors, disk.counts.num_written = 3, 7
    answer(harness, "again", prompt)
    harness.engine.record_state()
    counted = harness.metrics.drain().counters
    assert counted["kv_disk_errors_total", ""] == 3
    assert counted["kv_disk_blocks_total", "written"] == 7
    assert counted["kv_disk_blocks_total", "read"] == len(disk.log)
    assert counted["kv_disk_wait_seconds_total", ""] > 0


def test_a_snapshot_shows_the_tiers_and_what_a_request_waits_for():
    harness, disk, prompt = restarted(max_copies=1)
    disk.polls_until_done = 4
    disk.status = DiskStatus(5, 5 * 4096, is_paused=True, max_bytes=2**20)
    harness.add("again-0", prompt, 4)
    harness.turn()
    view = harness.engine._kv_view
    snapshot = view.snapshot()
    host, below = snapshot.tiers
    assert (host.name, host.num_blocks, host.num_waiting, host.max_bytes) == ("host", 0, 0, 0)  # pages of no bytes
    assert (below.name, below.num_blocks, below.num_bytes, below.max_bytes) == ("disk", 5, 5 * 4096, 2**20)
    assert (below.num_outgoing, below.num_waiting, below.is_paused) == (len(disk.log), 1, True)
    (row,) = snapshot.requests
    assert (row.state, row.num_host_blocks, row.num_disk_blocks) == ("waiting", 0, len(disk.log))
    while harness.scheduler.kv.tiers.num_outside:
        harness.turn()
    (row,) = (snapshot := view.snapshot()).requests
    assert (row.state, row.num_disk_blocks) == ("waiting", 0)
    assert row.num_host_blocks == snapshot.tiers[0].num_outgoing > 0
    assert snapshot.tiers[0].num_waiting == 1
    harness.drain()
    host, below = view.snapshot().tiers
    assert host.num_hit_tokens == below.num_hit_tokens >= 16
    settle(harness, disk)


def pinned_answer(harness, disk, name, prompt, **fields):
    harness.add(name, prompt, 4, open_salt="team", cache_salt="team", **fields)
    harness.drain()
    settle(harness, disk)
    return harness.seen[name]


@pytest.mark.parametrize("kind", GROUPS)
def test_a_pin_is_on_disk_and_in_host_memory_again_after_a_restart(kind):
    harness, disk = with_disk(kind)
    pinned_answer(harness, disk, "first", PROMPT, pin_s=300.0)
    host = harness.scheduler.kv.pins.host
    assert disk.pinned.keys() == set(host.blocks) & disk.blocks.keys()
    assert len(disk.pinned) >= 2
    assert {owner for owner, _ in disk.pinned.values()} == {"team"}
    assert all(0 < for_s <= 300.0 for _, for_s in disk.pinned.values())
    kept = {name: (owner, 100.0) for name, (owner, _) in disk.pinned.items()}  # 200 s later
    harness, disk = with_disk(kind, blocks=disk.blocks)
    disk.pinned = dict(kept)
    answered_s = harness.engine.clock()
    assert pinned_answer(harness, disk, "again", PROMPT).num_cached_tokens >= 16
    host = harness.scheduler.kv.pins.host
    read = set(disk.log) & kept.keys()
    assert read
    assert set(host.blocks) == read
    assert all(answered_s + 99 < host.find(name).deadline_s < answered_s + 110 for name in read)
    assert {host.find(name).owner for name in read} == {"team"}
    harness.scheduler.check()


def test_nothing_is_pinned_on_disk_that_was_not_asked_for():
    harness, disk = with_disk()
    pinned_answer(harness, disk, "first", PROMPT)
    assert disk.blocks
    assert disk.pinned == {}
