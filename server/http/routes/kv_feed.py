"""KvFeed: the snapshots of the KV cache for the viewers of one worker. Imports engine.interface; never torch.

KvFeed requests at most one snapshot per interval for all viewers, and none without a viewer. Each snapshot is encoded
as JSON once: the engine's request ids (`ID-CHOICE`, server/generation/generation.py) become the clients' ids.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from engine.interface.client import EngineClient
from engine.interface.errors import EngineError
from engine.interface.kv_snapshot import CacheReason, KvRequest, KvSnapshot, KvTier, LayerKind

INTERVAL_S = 0.25
_ANSWER_TIMEOUT_S = 5.0  # a step on a CPU may take seconds
_MAX_SHARE = 0.02  # of the engine's time, so that expensive snapshots are requested less often
_MAX_AGE_S = 2.0  # upper limit of a snapshot's age, because the measured cost is high on busy cores

_encoder = msgspec.json.Encoder()


class KvKindCounts(msgspec.Struct):
    """The blocks of one kind of layer: "full" | "window" | "state"."""

    kind: str
    num_used: int
    num_cached: int


class KvGroupLayout(msgspec.Struct):
    """A group of layers whose caches live alike. num_tokens, num_pages: of one of its blocks, which takes pages."""

    kind: LayerKind
    num_tokens: int
    num_pages: int


class KvStateCounts(msgspec.Struct):
    """States of recurrent layers: live ones of requests, saved ones that can be found; four counts since the start."""

    num_live: int
    num_saved: int
    live_bytes: int
    saved_bytes: int
    num_made: int
    num_skipped: int
    num_restored: int
    num_evicted: int


class KvPool(msgspec.Struct):
    """The pool in blocks: used + cached + empty = num_blocks; shared ones are used by several requests.

    groups: in the order of a request's group_runs; states: null of a model without recurrent layers.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int
    num_used: int
    num_shared: int
    num_cached: int
    num_empty: int
    kinds: list[KvKindCounts]
    groups: list[KvGroupLayout]
    states: KvStateCounts | None


class KvTierState(msgspec.Struct):
    """A tier behind the pool: host memory, or a disk behind that. Its blocks may be several of the pool's.

    bytes: that are not free; num_incoming, num_outgoing: blocks that are on their way to it and from it, or wait for
    that; num_waiting: requests that wait for its blocks. The other counts are since the engine's start. is_paused: a
    disk is left alone after errors in a row.
    """

    name: Literal["host", "disk"]
    num_blocks: int
    bytes: int
    max_bytes: int
    num_incoming: int
    num_outgoing: int
    num_waiting: int
    num_hit_tokens: int
    num_evictions: int
    num_errors: int
    is_paused: bool


class KvTotals(msgspec.Struct):
    """Since the engine's start. hit_rate: of the prompt tokens looked up in the prefix cache; null before the first."""

    num_queried_tokens: int
    num_hit_tokens: int
    hit_rate: float | None
    num_evictions: int
    num_preemptions: int


class KvHolder(msgspec.Struct):
    """One choice of a request. runs: its blocks in order: first, count, first, count, …; a count below 0 descends.

    group_runs: how many of the runs are of each group of layers whose caches live alike. restored_tokens: those before
    the saved state that it began with; saved_tokens: those before each state that it saved and that is still there.
    num_host_blocks, num_disk_blocks: those that a waiting request waits for, on their way from host memory, from disk.
    """

    id: str
    index: int
    state: str
    num_blocks: int
    num_shared_blocks: int
    bytes: int
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_hit_tokens: int
    age_s: float
    num_preemptions: int
    runs: list[int]
    group_runs: list[int]
    num_state_blocks: int
    restored_tokens: int
    saved_tokens: list[int]
    cache_reason: CacheReason | None
    num_host_blocks: int
    num_disk_blocks: int


class KvState(msgspec.Struct):
    """The answer of GET /kv/snapshot. time: Unix seconds; cached_runs: free blocks whose content can still be found.

    engine: of several, the one whose pool this is. engines: all of them.
    """

    model: str
    engine: str | None
    engines: list[str]
    time: float
    step_id: int
    pool: KvPool
    totals: KvTotals
    requests: list[KvHolder]
    num_unlisted: int
    cached_runs: list[int]
    tiers: list[KvTierState]


class Shown(msgspec.Struct):
    """A snapshot as it is sent. revision: unchanged if nothing but the time has changed."""

    body: bytes
    revision: int
    time: float  # Unix seconds
    next_s: float  # time.monotonic() of the next snapshot


class KvFeed:
    """The feed of one worker. Without viewers it holds the last snapshot, and no task and no timer."""

    def __init__(
        self,
        client: EngineClient,
        *,
        model: str,
        engine: str | None = None,
        engines: Sequence[str] = (),
        interval_s: float = INTERVAL_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """client: of the engine that is shown. engine, engines: its name and all names, if there are several."""
        self._client = client
        self._engine = engine
        self._engines = list(engines)
        self._model = model
        self._interval_s = interval_s
        self._wall = wall
        self._shown: Shown | None = None
        self._key: object = None  # equal for snapshots of the same revision
        self._asking: asyncio.Task[Shown] | None = None

    async def next(self) -> Shown:
        """Return a snapshot that is no older than the interval. Raises EngineDead, ShuttingDown, EngineError."""
        if self._shown is not None and time.monotonic() < self._shown.next_s and self._client.ready is not None:
            return self._shown
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Shown:
        asked_s = time.monotonic()
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                snapshot = await self._client.kv_snapshot()
        except TimeoutError:
            raise EngineError(f"The engine has not answered within {_ANSWER_TIMEOUT_S:g} s; it may be busy.") from None
        wall_s = self._wall() - (time.monotonic() - snapshot.now_s)
        key = _revision_key(snapshot)
        revision = self._shown.revision if self._shown is not None else 0
        if key != self._key or self._shown is None:
            self._key = key
            revision += 1
        state = state_of(snapshot, model=self._model, wall_s=wall_s, engine=self._engine, engines=self._engines)
        body = _encoder.encode(state)
        next_s = asked_s + max(self._interval_s, min(snapshot.cost_s / _MAX_SHARE, _MAX_AGE_S))
        self._shown = Shown(body, revision, wall_s, next_s)
        return self._shown

    def _asked(self, task: asyncio.Task[Shown]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, because no viewer may be waiting


def state_of(
    snapshot: KvSnapshot, *, model: str, wall_s: float, engine: str | None = None, engines: Sequence[str] = ()
) -> KvState:
    """Return a snapshot in the form of the API. wall_s: the Unix time at which it was made."""
    pool = KvPool(
        num_blocks=snapshot.num_blocks,
        block_size=snapshot.block_size,
        bytes_per_block=snapshot.bytes_per_block,
        num_used=snapshot.num_used,
        num_shared=snapshot.num_shared,
        num_cached=snapshot.num_cached,
        num_empty=snapshot.num_blocks - snapshot.num_used - snapshot.num_cached,
        kinds=[KvKindCounts(kind.kind, kind.num_used, kind.num_cached) for kind in snapshot.kinds],
        groups=[KvGroupLayout(group.kind, group.num_tokens, group.num_pages) for group in snapshot.groups],
        states=_states(snapshot),
    )
    queried, hit = snapshot.num_queried_tokens, snapshot.num_hit_tokens
    totals = KvTotals(
        num_queried_tokens=queried,
        num_hit_tokens=hit,
        hit_rate=round(hit / queried, 4) if queried else None,
        num_evictions=snapshot.num_evictions,
        num_preemptions=snapshot.num_preemptions,
    )
    runs, begin = _integers(snapshot.runs), 0
    requests = []
    for row in snapshot.requests:
        end = begin + 2 * row.num_runs
        requests.append(_holder(row, runs[begin:end], snapshot.bytes_per_block))
        begin = end
    return KvState(
        model=model,
        engine=engine,
        engines=list(engines),
        time=round(wall_s, 3),
        step_id=snapshot.step_id,
        pool=pool,
        totals=totals,
        requests=requests,
        num_unlisted=snapshot.num_unlisted,
        cached_runs=_integers(snapshot.cached_runs),
        tiers=[_tier(tier) for tier in snapshot.tiers],
    )


def _holder(row: KvRequest, runs: list[int], bytes_per_block: int) -> KvHolder:
    public_id, _, index = row.request_id.rpartition("-")
    num_tokens = row.num_prompt_tokens + row.num_output_tokens
    return KvHolder(
        id=public_id,
        index=int(index),
        state=row.state,
        num_blocks=row.num_blocks,
        num_shared_blocks=row.num_shared_blocks,
        bytes=row.num_blocks * bytes_per_block,
        num_tokens=num_tokens,
        num_computed_tokens=min(row.num_computed_tokens, num_tokens),  # without drafts in flight
        num_prompt_tokens=row.num_prompt_tokens,
        num_hit_tokens=row.num_hit_tokens,
        age_s=round(row.age_s, 3),
        num_preemptions=row.num_preemptions,
        runs=runs,
        group_runs=row.num_group_runs,
        num_state_blocks=row.num_state_blocks,
        restored_tokens=row.restored_tokens,
        saved_tokens=row.saved_tokens,
        cache_reason=row.cache_reason,
        num_host_blocks=row.num_host_blocks,
        num_disk_blocks=row.num_disk_blocks,
    )


def _tier(tier: KvTier) -> KvTierState:
    return KvTierState(
        name=tier.name,
        num_blocks=tier.num_blocks,
        bytes=tier.num_bytes,
        max_bytes=tier.max_bytes,
        num_incoming=tier.num_incoming,
        num_outgoing=tier.num_outgoing,
        num_waiting=tier.num_waiting,
        num_hit_tokens=tier.num_hit_tokens,
        num_evictions=tier.num_evictions,
        num_errors=tier.num_errors,
        is_paused=tier.is_paused,
    )


def _states(snapshot: KvSnapshot) -> KvStateCounts | None:
    states, size = snapshot.states, snapshot.bytes_per_block
    if states is None:
        return None
    return KvStateCounts(
        num_live=states.num_live,
        num_saved=states.num_saved,
        live_bytes=states.num_live_blocks * size,
        saved_bytes=states.num_saved_blocks * size,
        num_made=states.num_made,
        num_skipped=states.num_skipped,
        num_restored=states.num_restored,
        num_evicted=states.num_evicted,
    )


def _revision_key(snapshot: KvSnapshot) -> object:
    """Return a value that is equal for snapshots in which nothing but time differs."""
    states = [
        (row.request_id, row.state, row.num_computed_tokens, row.num_host_blocks, row.num_disk_blocks)
        for row in snapshot.requests
    ]
    tiers = [msgspec.structs.astuple(tier) for tier in snapshot.tiers]
    return snapshot.step_id, states, snapshot.runs, snapshot.cached_runs, snapshot.num_unlisted, tiers


def _integers(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    return values.tolist()
