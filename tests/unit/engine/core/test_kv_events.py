"""Events tell which blocks each tier has: what a router rebuilds from them is what the tiers hold, on any trace."""

from random import Random

import pytest

from engine.core.kv_events import Medium, Removed, Stored
from engine.core.request import root_hash
from tests.support.cache_traces import Trace
from tests.support.engine_harness import Harness
from tests.support.kv_subscriber import HeldBlocks, truth
from tests.support.layered_harness import PROMPT, host_harness
from tests.unit.engine.core.test_disk_tier import GROUPS, settle, with_disk


def watch(harness):
    """Let what a router knows follow an engine's events, and be compared after each turn."""
    known = HeldBlocks()
    events = harness.engine.report_kv_events(known.apply)
    run_once = harness.engine.run_once

    def run_and_compare(idle_timeout_s=None):
        run_once(idle_timeout_s)
        kv = harness.scheduler.kv
        disk = events.held(Medium.DISK)
        if kv.tiers.disk is not None:
            assert disk <= kv.tiers.disk._parts.threads.blocks.keys()
        assert known.held == truth(kv, events, disk)
        held = events.held(Medium.DEVICE) | events.held(Medium.HOST) | disk
        assert len(held) <= events.num_blocks <= len(held | reading(kv)), "a block that no tier has is remembered"

    harness.engine.run_once = run_and_compare
    return known, events


def reading(kv):
    """Return the blocks that are described since they are being read from the disk."""
    leading = kv.events.leading
    return set() if kv.tiers.disk is None else {name for name in kv.tiers.disk._reading if name[0] == leading}


@pytest.mark.parametrize("is_tiered", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_router_knows_what_pool_and_host_memory_have_on_any_trace(seed, is_tiered):
    trace = Trace.draw(seed, is_tiered=is_tiered)
    trace.replay(depth=1 + seed % 2, num_drafts=trace.num_drafts if seed % 3 == 0 else 0, change=watch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", GROUPS)
def test_a_router_knows_what_a_slow_and_failing_disk_has(kind, seed):
    rng, blocks = Random(seed), {}
    turns = [[rng.randrange(40)] * 8 for _ in range(4)]
    num_found = 0
    for _ in range(3):
        harness, disk = with_disk(kind, blocks=blocks, num_slots=rng.choice([24, 60, 200]))
        known, _ = watch(harness)
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
            if disk.blocks and rng.random() < 0.3:
                disk.evict(rng.choice(list(disk.blocks)))
        harness.drain()
        settle(harness, disk)
        harness.turn()
        num_found += len(known.held[Medium.DISK])
    assert num_found > 0


def test_a_block_has_the_tokens_before_it_in_every_tier():
    harness, disk = with_disk()
    known, events = watch(harness)
    harness.add("first", PROMPT, 4)
    harness.drain()
    settle(harness, disk)
    harness.turn()
    sequence = PROMPT + harness.seen["first"].token_ids
    for medium in Medium:
        assert known.held[medium]
        assert {tuple(known.tokens[hash_]) for hash_ in known.held[medium]} == {
            tuple(sequence[:end]) for end in range(4, 21, 4)
        }
    assert events.num_blocks == 5


def test_what_a_disk_had_before_is_told_with_its_tokens_when_a_request_asks_for_it():
    harness, disk = with_disk()
    harness.add("first", PROMPT, 4)
    harness.drain()
    settle(harness, disk)
    harness, disk = with_disk(blocks=disk.blocks)
    known, _ = watch(harness)
    harness.turn()
    assert not known.held[Medium.DISK]
    harness.add("again", PROMPT, 4)
    harness.drain()
    assert harness.seen["again"].num_cached_tokens == 16
    assert len(known.held[Medium.DISK]) >= 4
    assert all(known.tokens[hash_] == PROMPT[: len(known.tokens[hash_])] for hash_ in known.held[Medium.DISK])


def test_blocks_of_one_prompt_are_one_event_and_their_hash_is_the_end_of_their_key():
    harness = Harness(max_num_batched_tokens=64)
    batches = []
    events = harness.engine.report_kv_events(batches.append)
    harness.add("one", list(range(17)), 1)
    harness.drain()
    ((stored,),) = [batch for batch in batches if batch]
    assert isinstance(stored, Stored)
    assert (stored.medium, stored.group, stored.parent, stored.lora_index) == (Medium.DEVICE, 0, None, 0)
    assert list(stored.token_ids) == list(range(16))
    keys = harness.scheduler.kv.pool._published[0]
    assert stored.hashes == [int.from_bytes(key[-8:], "big") for key in keys]
    assert root_hash("", b"") not in keys
    harness.scheduler.kv.pool.expel(0, list(keys)[-1])
    assert events.take() == [Removed(Medium.DEVICE, 0, stored.hashes[-1:])]


def test_blocks_of_adapters_and_other_groups_have_hashes_of_their_own():
    harness = host_harness(groups=GROUPS["window"], num_pages=33)
    batches = []
    harness.engine.report_kv_events(batches.extend)
    harness.add("plain", PROMPT, 1)
    harness.add("adapted", PROMPT, 1, lora_index=2)
    harness.drain()
    stored = [event for event in batches if isinstance(event, Stored) and event.medium is Medium.DEVICE]
    assert {(event.group, event.lora_index, bool(event.token_ids)) for event in stored} >= {
        (0, 0, True), (0, 2, True), (1, 0, False),
    }  # fmt: skip
    hashes = [hash_ for event in stored for hash_ in event.hashes]
    assert len(hashes) == len(set(hashes))
