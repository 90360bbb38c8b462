"""A made-up engine with 40,000 blocks and 500 requests, whose snapshots differ from one to the next."""

import time
from array import array

from engine.interface.kv_snapshot import KvGroup, KvRequest, KvSnapshot, KvStates
from tests.support.fakes import FakeEngineClient

NUM_BLOCKS, NUM_REQUESTS = 40_000, 500
_STRIDE = 7919  # shares no factor with 40,000: neighbours in a table are far apart in the pool


class LargePoolClient(FakeEngineClient):
    """Answers like an engine that adds a block to each request with every snapshot, up to a point, and begins anew."""

    async def kv_snapshot(self) -> KvSnapshot:
        self.num_kv_asks += 1
        return make_snapshot(self.num_kv_asks)


def make_snapshot(step_id: int) -> KvSnapshot:
    """Return a pool in which every second request shares 60 blocks with others, and most runs are one block long."""
    pool = (1 + place * _STRIDE % NUM_BLOCKS for place in range(NUM_BLOCKS))
    prefixes = [[next(pool) for _ in range(60)] for _ in range(5)]
    runs, rows = array("i"), []
    for number in range(NUM_REQUESTS):
        own = [next(pool) for _ in range(20 + number * 7 % 40 + step_id % 30)]
        table = [*prefixes[number % 5], *own] if number % 2 else own
        for block in table:
            runs.extend((block, 1))
        hit = 960 if number % 2 else 0
        size, age_s = len(table), number * 0.3 + step_id / 4
        name = f"chatcmpl-{number * 2654435761 % 2**32:08x}{number:08x}-0"
        row = KvRequest(name, "running", size, size, hit // 16, size * 16, size * 12, size * 4, hit, age_s, number % 3)
        rows.append(row)
    rest = sorted(next(pool) for _ in range(4000))
    cached = array("i", [value for block in rest for value in (block, 1)])
    return KvSnapshot(
        step_id=step_id, now_s=time.monotonic(), cost_s=0.002, num_blocks=NUM_BLOCKS, block_size=16,
        bytes_per_block=2 << 20, num_used=sum(row.num_blocks for row in rows) - 60 * 250 + 300, num_shared=300,
        num_cached=len(rest), requests=rows, num_unlisted=0, runs=runs.tobytes(), cached_runs=cached.tobytes(),
        num_queried_tokens=10**6, num_hit_tokens=620_000, num_evictions=512, num_preemptions=33,
    )  # fmt: skip


class HybridClient(FakeEngineClient):
    """Answers like the engine of a model with recurrent layers, that serves two requests."""

    async def kv_snapshot(self) -> KvSnapshot:
        self.num_kv_asks += 1
        first = KvRequest("chatcmpl-aa-0", "running", 2, 5, 0, 32, 40, 0, 16, 1.0, 0, [1, 1], 3, 16, [32], "evicted")
        second = KvRequest("chatcmpl-bb-0", "running", 2, 5, 0, 30, 30, 0, 0, 2.0, 0, [1, 1], 3, 0, [], "differs")
        return KvSnapshot(
            step_id=self.num_kv_asks, now_s=time.monotonic(), cost_s=0.001, num_blocks=40, block_size=16,
            bytes_per_block=1 << 20, num_used=10, num_shared=0, num_cached=6, requests=[first, second], num_unlisted=0,
            runs=array("i", [1, 2, 3, 3, 6, 2, 8, 3]).tobytes(), cached_runs=array("i", [20, 6]).tobytes(),
            num_queried_tokens=100, num_hit_tokens=16, num_evictions=4, num_preemptions=0,
            groups=[KvGroup("full", 16, 1), KvGroup("state", 16, 3)], states=KvStates(2, 2, 6, 6, 3, 1, 1, 1),
        )  # fmt: skip
