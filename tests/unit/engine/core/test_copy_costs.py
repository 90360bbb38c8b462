"""What a step copies follows the step: little beside decode rows, more with a long prompt; and what waits is kept."""

from functools import partial

from engine.core.copy_costs import CopyCosts
from engine.core.page_pool import PagePool
from engine.interface.config import CacheGroup, HostTierConfig, PeerConfig
from engine.startup.host_memory import host_tier_config
from tests.support.engine_harness import decode_plan
from tests.support.layered_harness import PROMPT, host_harness

make = partial(host_harness, num_pages=65, num_slots=100, max_copies=4)


def plans_of(harness):
    """Return decode tokens, prompt tokens and pages to the host of each step."""
    plans = [decode_plan(plan) for plan in harness.executor.plans]
    found = []
    for plan in plans:
        prompts = [row.num_tokens for row in plan.rows if len(row.token_ids) > 1]
        num_decodes = plan.num_tokens - sum(prompts)
        found.append((num_decodes, sum(prompts), len(plan.copies_to_host)))
    return found


def test_the_bound_follows_the_step():
    costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=8, max_copies_beside=4, copies_per_token=0.01))
    assert costs.most_pages(num_prompt_tokens=0, num_decodes=0) == 8
    assert costs.most_pages(num_prompt_tokens=0, num_decodes=1) == 4
    assert costs.most_pages(num_prompt_tokens=500, num_decodes=1) == 9
    assert costs.most_pages(num_prompt_tokens=500, num_decodes=0) == 8
    assert costs.most_pages(num_prompt_tokens=5000, num_decodes=0) == 50


def test_a_millisecond_beside_decode_rows_two_without_and_an_eighth_of_a_prompt():
    config = host_tier_config(1000, page_s=0.0001, tokens_per_s=10_000.0)
    costs = CopyCosts(config)
    assert costs.most_pages(num_prompt_tokens=0, num_decodes=32) == 10
    assert costs.most_pages(num_prompt_tokens=0, num_decodes=0) == 20
    assert costs.most_pages(num_prompt_tokens=8000, num_decodes=0) == 1000  # 0.1 of 0.8 s
    assert costs.most_pages(num_prompt_tokens=800, num_decodes=32) == 110


def test_without_rates_nothing_bounds_a_step_but_host_memory():
    costs = CopyCosts(host_tier_config(1000, page_s=0.0, tokens_per_s=None))
    assert costs.most_pages(num_prompt_tokens=0, num_decodes=1) == 1000


def test_engines_that_hand_prompts_over_copy_as_much_beside_decode_rows():
    for role, most in (("decode", 40), ("prefill", 500)):
        peer = PeerConfig(role=role, index=0, num_prefill=1, num_decode=1)
        costs = CopyCosts(host_tier_config(1000, page_s=0.0001, tokens_per_s=None, peer=peer))
        assert costs.most_pages(num_prompt_tokens=0, num_decodes=1) == most


def test_decode_rows_wait_for_fewer_copies():
    harness = make(max_copies=4, max_copies_beside=1, max_num_batched_tokens=40)
    harness.add("short", [1, 2, 3], 8)
    harness.turn(3)
    harness.add("long", PROMPT + PROMPT[::-1], 1)
    harness.drain()
    steps = plans_of(harness)
    assert max(copied for decodes, _, copied in steps if decodes) == 1
    assert max(copied for decodes, _, copied in steps if not decodes) > 1
    assert harness.scheduler.kv.tiers.host.num_missed == 0


def test_a_step_with_a_long_prompt_copies_more_beside_decode_rows():
    harness = make(max_copies=1, max_copies_beside=1, copies_per_token=0.2, max_num_batched_tokens=24)
    harness.add("short", [1, 2, 3], 30)
    harness.turn(3)
    for number in range(3):
        harness.add(f"long{number}", [number, *PROMPT, *PROMPT], 1)
    harness.drain()
    beside = [(prompt, copied) for decodes, prompt, copied in plans_of(harness) if decodes]
    assert max(copied for prompt, copied in beside if not prompt) == 1
    assert 1 < max(copied for prompt, copied in beside if prompt) <= 1 + 0.2 * 24


def test_the_pool_reuses_blocks_that_wait_for_a_copy_after_others_and_before_pinned_ones():
    pool = PagePool([CacheGroup("full", 4)], num_pages=5)
    blocks = [pool.take(0) for _ in range(4)]
    for number, block in enumerate(blocks):
        pool.publish(0, bytes([number]), block)
    pool.release(blocks)
    pool.pin(blocks[0])
    pool.order.await_copy(blocks[1])
    pool.order.await_copy(blocks[0])  # pinned: it stays among those
    pool.order.await_copy(blocks[3])
    pool.spend(blocks[3])
    pool.check({})
    assert [pool.take(0) for _ in range(4)] == [blocks[3], blocks[2], blocks[1], blocks[0]]


def test_a_block_that_waits_no_longer_is_reused_like_others():
    pool = PagePool([CacheGroup("full", 4)], num_pages=4)
    blocks = [pool.take(0) for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.publish(0, bytes([number]), block)
    pool.release(blocks)
    for block in blocks[:2]:
        pool.order.await_copy(block)
    pool.order.settle([blocks[1]])
    pool.order.settle([blocks[1]])
    pool.hold([blocks[0]])
    pool.check({blocks[0]: 1})
    assert [pool.take(0) for _ in range(2)] == [blocks[2], blocks[1]]


def copied_and_waiting():
    """Return an engine that copies nothing for now: it has copied PROMPT, used last, but not what is older."""
    harness = make(num_pages=17)
    harness.add("copied", PROMPT, 4)
    harness.drain()
    tier = harness.scheduler.kv.tiers.host
    tier.costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=0))
    for name, prompt in (("waiting", [30] * 20), ("again", PROMPT)):
        harness.add(name, prompt, 4)
        while not harness.seen[name].ends:
            harness.turn()
    return harness, tier


def test_a_block_that_waits_for_its_copy_is_kept_while_the_pool_has_others():
    harness, tier = copied_and_waiting()
    harness.add("next", [40] * 30, 4)  # it needs 9 pages, of which 6 are blank
    while not harness.seen["next"].ends:
        harness.turn()
    assert sum(harness.scheduler.kv.pool.num_evictions) > 0
    tier.costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=4))
    harness.drain()
    assert tier.num_missed == 0
    harness.add("returned", [*[30] * 20, 1], 4)
    harness.drain()
    assert harness.seen["returned"].num_cached_tokens == 20


def test_a_block_that_waits_is_lost_before_a_request_lacks_pages():
    harness, tier = copied_and_waiting()
    harness.add("large", [40] * 58, 4)
    while not harness.seen["large"].ends:
        harness.turn()
    assert harness.seen["large"].ends == ["length"]
    tier.costs = CopyCosts(HostTierConfig(num_slots=100, max_copies=4))
    harness.drain()
    assert tier.num_missed > 0


def test_copies_that_nobody_waits_for_take_a_share_of_the_time_beside_decode_rows():
    config = HostTierConfig(num_slots=100, max_copies=20, max_copies_beside=10, page_s=0.0001, unasked_share=0.05)
    costs = CopyCosts(config)
    assert costs.most_unasked(most=20, num_prompt_tokens=0, num_decodes=0) == 20
    assert costs.most_unasked(most=10, num_prompt_tokens=0, num_decodes=32) == 0
    costs.observe_commit(1.0)
    num_copied = 0
    for step in range(1, 101):
        costs.observe_commit(1.0 + step * 0.006)
        most = costs.most_unasked(most=10, num_prompt_tokens=0, num_decodes=32)
        costs.spend(most)
        num_copied += most
    assert 299 <= num_copied <= 300  # 5 % of 0.6 s
    costs.observe_commit(1000.0)
    assert costs.most_unasked(most=50, num_prompt_tokens=0, num_decodes=32) == 10  # idle time earns those of one step
