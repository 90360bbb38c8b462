"""Groups of running requests that begin with the same blocks: which, from when on, and what the device is told."""

import random

import msgspec
import pytest

from engine.core.request import BlockTable, Request
from engine.core.shared_prefixes import MAX_GROUPS, SharedPrefixes
from engine.interface.config import CacheGroup, SchedulerConfig, SharingRates
from engine.interface.protocol import SamplingParams
from tests.support.engine_harness import Harness, decode_plan

FREE = SharingRates(chunk_tokens=8)  # chunks of 2 blocks of 4 tokens
DOCUMENT, OTHER = list(range(16)), list(range(50, 66))


class Device:
    """What it was told of each request, and the requests that run."""

    def __init__(self, rates=FREE):
        self.prefixes = SharedPrefixes(rates, group_index=0, block_tokens=4)
        self.running = {}
        self.shares = {}
        self.spared_us = 0

    def join(self, name, blocks, num_tokens=None):
        request = Request(name, [0] * (num_tokens or 4 * len(blocks)), SamplingParams(max_tokens=1))
        request.req_index, request.tables = len(self.shares), [BlockTable(list(blocks))]
        self.running[name], self.shares[request.req_index] = request, (0, 0)
        self.prefixes.join(request)

    def leave(self, name):
        self.prefixes.leave(self.running.pop(name))

    def groups(self):
        """The names of each group, and its tokens."""
        shares, self.spared_us = self.prefixes.take()
        self.shares.update({req_index: share for req_index, *share in shares})
        self.prefixes.check(list(self.running.values()))
        found = {}
        for name, request in self.running.items():
            number, tokens = self.shares[request.req_index]
            if number:
                found.setdefault((number, tokens), []).append(name)
        assert len({number for number, _ in found}) == len(found)
        return sorted((names, tokens) for (_, tokens), names in found.items())


def test_two_requests_with_the_same_leading_blocks_are_a_group_until_one_leaves():
    device = Device()
    device.join("a", [*range(6), 10])
    assert device.groups() == []
    assert device.spared_us == 0
    device.join("b", [*range(6), 20, 21])
    assert device.groups() == [(["a", "b"], 24)]
    assert device.spared_us > 0
    assert device.prefixes.take() == ([], 24)
    device.leave("a")
    assert device.groups() == []
    assert device.spared_us == 0


def test_a_partial_chunk_and_equal_blocks_behind_unequal_ones_do_not_count():
    device = Device()
    device.join("a", [1, 2, 3, 9])
    device.join("b", [1, 2, 3, 8])
    device.join("c", [7, 2, 3, 9])
    assert device.groups() == [(["a", "b"], 8)]


def test_only_whole_chunks_of_the_prompt_are_shared():
    device = Device()
    device.join("a", range(4), num_tokens=15)
    device.join("b", range(4), num_tokens=16)
    assert device.groups() == [(["a", "b"], 8)]


def test_longer_prefixes_of_fewer_requests_win_if_they_spare_more():
    device = Device()
    for name in "ab":
        device.join(name, [0, 1, *range(100, 140)])
    for name in "cd":
        device.join(name, [0, 1, *range(200, 240)])
    assert device.groups() == [(["a", "b"], 168), (["c", "d"], 168)]
    for i in range(40):
        device.join(f"e{i}", [0, 1, 300 + 2 * i, 301 + 2 * i])
    ((names, tokens),) = device.groups()
    assert (len(names), tokens) == (44, 8)
    for i in range(40):
        device.leave(f"e{i}")
    assert device.groups() == [(["a", "b"], 168), (["c", "d"], 168)]


def test_rates_decide_which_groups_and_whether_steps_are_worth_it():
    device = Device(SharingRates(chunk_tokens=8, row_keys=5, group_keys=3, step_keys=20, key_us=0.5))
    device.join("a", range(6))
    device.join("b", range(6))  # 24 - 2 * 5 - 3 = 11 keys are spared
    assert device.groups() == [(["a", "b"], 24)]
    assert device.spared_us == 0
    device.join("c", range(6))  # 48 - 3 * 5 - 3 = 30
    assert device.groups() == [(["a", "b", "c"], 24)]
    assert device.spared_us == 5


def test_more_groups_than_numbers_leave_requests_alone():
    device = Device()
    for i in range(MAX_GROUPS + 3):
        for name in "ab":
            device.join(f"{i}{name}", [2 * i, 2 * i + 1])
    assert len(device.groups()) == MAX_GROUPS
    device.leave("0a")
    device.join(f"{MAX_GROUPS}c", [2 * MAX_GROUPS, 2 * MAX_GROUPS + 1])
    assert len(device.groups()) == MAX_GROUPS


@pytest.mark.parametrize("seed", range(20))
def test_whatever_joins_and_leaves_members_have_equal_blocks_and_the_device_knows_all(seed):
    draw = random.Random(seed)
    rates = SharingRates(
        chunk_tokens=8, row_keys=draw.choice([0, 3]), group_keys=draw.choice([0, 9]), shared_percent=draw.choice([0, 9])
    )
    device, blocks = Device(rates), {}
    for turn in range(120):
        if device.running and draw.random() < 0.4:
            device.leave(draw.choice(list(device.running)))
        else:
            head = [draw.choice([1, 2])] * 2 + [draw.choice([3, 4])] * 4 + [draw.choice([5, 6])] * 4
            blocks[f"r{turn}"] = [*head[: draw.choice([2, 6, 8, 10])], 1000 + turn, 2000 + turn]
            device.join(f"r{turn}", blocks[f"r{turn}"])
        if draw.random() < 0.1:
            device.prefixes.send_again()
            device.shares = dict.fromkeys(device.shares, (7, 7))
        if draw.random() < 0.7:
            for names, tokens in device.groups():
                assert len({tuple(blocks[name][: tokens // 4]) for name in names}) == 1
    for name in list(device.running):
        device.leave(name)
    assert device.groups() == []
    assert not device.prefixes._root.children


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_name_groups_of_requests_that_hit_the_prefix_cache(depth):
    harness = Harness(depth=depth, num_pages=200, sharing=FREE)
    harness.add("a", [*DOCUMENT, 1, 2], max_tokens=30)
    for _ in range(6):
        harness.turn()
    harness.add("b", [*DOCUMENT, 3, 4], max_tokens=4)
    harness.add("c", OTHER, max_tokens=4)
    for _ in range(40):
        harness.turn()
    plans = [decode_plan(plan) for plan in harness.executor.plans]
    shares = [share for plan in plans for share in plan.shares]
    assert {(number > 0, tokens) for _, number, tokens in shares} == {(True, 16), (False, 0)}
    grouped = [plan for plan in plans if plan.is_grouped]
    assert grouped
    assert all(plan.num_rows > 1 for plan in grouped[2:-2])


@pytest.mark.parametrize(
    "changes",
    [
        {"sharing": None},
        {"enable_prefix_caching": False},
        {"groups": (CacheGroup("full", 4), CacheGroup("full", 8, 2))},
        {"groups": (CacheGroup("window", 4, window=8),)},
    ],
)
def test_nothing_is_grouped_without_a_cache_or_with_other_tables(changes):
    config = SchedulerConfig(
        num_pages=9, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, sharing=FREE
    )
    assert SharedPrefixes.of(config) is not None
    assert SharedPrefixes.of(msgspec.structs.replace(config, **changes)) is None
