"""KvView: makes KvSnapshots of the KV pool and its block tables, for display. Plain Python and numpy; never torch.

A snapshot is made only on request: the loop iteration then ends with one KvSnapshot, sent to all clients that asked
for one. It shows pages: a block of several is so many. Block tables are encoded as runs of adjacent pages and kept
between snapshots, so that each table is encoded once and then only extended. With 40,000 scattered blocks of 500
requests, the first snapshot takes about 6 ms of the loop, each later one 2 to 2.5 ms.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

import numpy as np

from engine.core.kv_caches import KvCaches
from engine.core.outputs import Transport
from engine.core.page_pool import PagePool
from engine.core.request import BlockTable, Request
from engine.core.scheduler import Scheduler
from engine.interface.kv_snapshot import KvGroup, KvKind, KvRequest, KvSnapshot, KvStates, KvTier

MAX_LISTED = 512  # requests without blocks: bounds the snapshot's size with a long queue


@dataclass(slots=True)
class TableRuns:
    """One block table of a request encoded as runs (KvSnapshot.runs); num_done: the encoded blocks."""

    table: BlockTable  # the request's own; a new admission replaces it
    first: int = 0  # the table's first column then
    num_done: int = 0
    num_pages: int = 0
    runs: array[int] = field(default_factory=lambda: array("i"))

    def new_pages(self, pool: PagePool) -> Sequence[int]:
        """Return the pages of the blocks that are not encoded yet, which then count as encoded."""
        blocks = self.table.blocks[self.num_done :]
        self.num_done += len(blocks)
        pages = pool.pages_of(blocks)
        self.num_pages += len(pages)
        return pages

    def add(self, runs: array[int]) -> None:
        """Append the runs of the table's new pages; merge the first into the last known run if they are adjacent."""
        known = self.runs
        if known and known[-1] > 0 and runs[1] > 0 and known[-2] + known[-1] == runs[0]:
            known[-1] += runs[1]
            runs = runs[2:]
        known.extend(runs)


class KvView:
    """Owns the list of clients that wait for a snapshot; reads the scheduler and never changes it."""

    def __init__(
        self,
        scheduler: Scheduler,
        pending: Mapping[str, Request],
        *,
        bytes_per_block: int,
        clock: Callable[[], float],
        num_ranks: int = 1,
    ) -> None:
        """pending: the requests whose grammar compiles, by request_id. bytes_per_block: on each rank."""
        self._scheduler = scheduler
        self._pending = pending
        self._bytes_per_block = bytes_per_block
        self._host_page_bytes = bytes_per_block * num_ranks
        self._clock = clock
        self.askers: list[int] = []  # client ids
        self._tables: dict[str, list[TableRuns]] = {}  # of the last snapshot's requests

    def ask(self, client_id: int) -> None:
        """Register a client for the next snapshot."""
        if client_id not in self.askers:
            self.askers.append(client_id)

    def answer(self, transport: Transport) -> None:
        """Send one snapshot to all `askers`."""
        snapshot = self.snapshot()
        for client_id in self.askers:
            transport.send(client_id, snapshot)
        self.askers.clear()

    def snapshot(self) -> KvSnapshot:
        """Return a snapshot of the pool and its requests."""
        now = self._clock()
        scheduler, kv, pool = self._scheduler, self._scheduler.kv, self._scheduler.kv.pool
        holders = [*scheduler.running, *scheduler.retiring]
        self._tables = {request.request_id: self._tables_of(request) for request in holders}
        _catch_up(list(chain.from_iterable(self._tables.values())), pool)
        parts = [table.runs for tables in self._tables.values() for table in tables]
        runs = b"".join(parts)
        num_holders = np.array(pool.num_holders(), np.int64)
        is_shared = num_holders > 1
        is_cached = np.zeros(len(num_holders), bool)
        is_cached[pool.pages_of(pool.published)] = True
        is_cached &= num_holders == 0
        num_runs = [sum(len(table.runs) for table in tables) // 2 for tables in self._tables.values()]
        num_shared = count_in_tables(is_shared, runs, num_runs)
        rows = [
            _row(
                request,
                request.status.value,
                now,
                sum(table.num_pages for table in tables),
                num_runs,
                num_shared,
                tables,
                kv,
            )
            for request, tables, num_runs, num_shared in zip(
                holders, self._tables.values(), num_runs, num_shared, strict=True
            )
        ]
        pending = _rows_without_blocks(self._pending.values(), "gate", now, kv)
        rows += islice(chain(pending, _rows_without_blocks(scheduler.waiting.requests, "waiting", now, kv)), MAX_LISTED)
        return KvSnapshot(
            step_id=scheduler.committed_step_id,
            now_s=now,
            cost_s=self._clock() - now,
            num_blocks=pool.num_usable,
            block_size=scheduler.config.block_size,
            bytes_per_block=self._bytes_per_block,
            num_used=pool.num_used,
            num_shared=int(np.count_nonzero(is_shared)),
            num_cached=int(np.count_nonzero(is_cached)),
            kinds=[KvKind(*counts) for counts in kv.pages_by_kind()],
            requests=rows,
            num_unlisted=max(0, len(scheduler.waiting) + len(self._pending) - MAX_LISTED),
            runs=runs,
            cached_runs=_runs_of(is_cached),
            num_queried_tokens=kv.num_queried_tokens,
            num_hit_tokens=kv.num_hit_tokens,
            num_evictions=sum(pool.num_evictions),
            num_preemptions=scheduler.num_preemptions,
            groups=[KvGroup(group.kind, group.tokens, group.pages) for group in kv.layout.groups],
            states=_states_of(kv, num_holders=len(holders)) if kv.layout.states else None,
            tiers=_tiers_of(kv, page_bytes=self._host_page_bytes),
        )

    def _tables_of(self, request: Request) -> list[TableRuns]:
        known = self._tables.get(request.request_id, [])
        known = known if known and known[0].table is request.tables[0] else []
        return [
            runs if runs is not None and runs.first == table.first else TableRuns(table, table.first)
            for table, runs in zip_longest(request.tables, known)
        ]


def encode_runs(block_ids: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tables as runs, [num_runs, 2] int32, and the index in `block_ids` of each run's first block.

    block_ids: [N] int32, N > 0, concatenated tables, each without duplicates, so a run never reverses its direction;
    starts: the index of each table's first block, since a run never spans two tables.
    """
    steps = np.zeros(len(block_ids), np.int32)  # steps[i] leads to block i
    np.subtract(block_ids[1:], block_ids[:-1], out=steps[1:])
    goes_on = np.abs(steps) == 1
    goes_on[starts] = False
    run_starts = np.flatnonzero(~goes_on)
    counts = np.diff(run_starts, append=len(block_ids))
    is_down = steps[np.minimum(run_starts + 1, len(steps) - 1)] < 0
    counts[is_down & (counts > 1)] *= -1
    return np.stack((block_ids[run_starts], counts), axis=1).astype(np.int32), run_starts


def count_in_tables(is_in: np.ndarray, runs: bytes, num_runs: list[int]) -> list[int]:
    """Return the number of blocks of each table that are in the mask `is_in`."""
    below = np.concatenate(([0], np.cumsum(is_in)))  # below[i]: marked blocks below i
    first, count = np.frombuffer(runs, np.int32).reshape(-1, 2).T
    low = np.where(count > 0, first, first + count + 1)
    found = np.concatenate(([0], np.cumsum(below[low + np.abs(count)] - below[low])))
    counts: list[int] = np.diff(found[np.cumsum(num_runs, dtype=np.int64)], prepend=0).tolist()
    return counts


def _catch_up(tables: list[TableRuns], pool: PagePool) -> None:
    """Encode the new blocks of all tables, in one pass."""
    behind = [table for table in tables if table.num_done < len(table.table.blocks)]
    if not behind:
        return
    new_pages = [table.new_pages(pool) for table in behind]
    sizes = np.array([len(pages) for pages in new_pages])
    ends = np.cumsum(sizes)
    runs, run_starts = encode_runs(np.fromiter(chain.from_iterable(new_pages), np.int32, int(ends[-1])), ends - sizes)
    begin = 0
    for table, end in zip(behind, np.searchsorted(run_starts, ends).tolist(), strict=True):
        table.add(array("i", runs[begin:end].tobytes()))
        begin = end


def _runs_of(is_in: np.ndarray) -> bytes:
    """Return the runs of all blocks in a mask."""
    edges = np.flatnonzero(np.diff(is_in, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    return np.stack((starts, ends - starts), axis=1).astype(np.int32).tobytes()


def _rows_without_blocks(requests: Iterable[Request], state: str, now: float, kv: KvCaches) -> Iterator[KvRequest]:
    for request in requests:
        yield _row(request, state, now, 0, 0, 0, [], kv)


def _row(
    request: Request,
    state: str,
    now: float,
    num_pages: int,
    num_runs: int,
    num_shared: int,
    tables: list[TableRuns],
    kv: KvCaches,
) -> KvRequest:
    return KvRequest(
        request.request_id,
        state,
        num_runs,
        num_pages,
        num_shared,
        request.num_computed_tokens,
        request.num_prompt_tokens,
        len(request.output_token_ids),
        request.num_cached_tokens,
        max(0.0, now - request.arrival_s),  # arrival_s was read by another process
        request.num_preemptions,
        [len(table.runs) // 2 for table in tables],
        sum(tables[group.index].num_pages for group in kv.layout.states) if tables else 0,
        request.restored_tokens,
        kv.checkpoints.saved_tokens(request) if request.saved_tokens else [],
        request.cache_report.reason if request.cache_report is not None else None,
        *kv.tiers.num_missing(request),
    )


def _states_of(kv: KvCaches, *, num_holders: int) -> KvStates:
    num_saved, num_saved_blocks = kv.checkpoints.num_findable()
    events = kv.state_events()
    return KvStates(
        num_live=num_holders * len(kv.layout.states),
        num_saved=num_saved,
        num_live_blocks=num_holders * sum(group.pages for group in kv.layout.states),
        num_saved_blocks=num_saved_blocks,
        num_made=events["saved"],
        num_skipped=events["skipped"],
        num_restored=events["restored"],
        num_evicted=events["evicted"],
    )


def _tiers_of(kv: KvCaches, *, page_bytes: int) -> list[KvTier]:
    tiers, host, disk = [], kv.tiers.host, kv.tiers.disk
    if host is not None:
        tiers.append(
            KvTier(
                "host",
                num_blocks=host.index.num_blocks,
                num_bytes=host.index.num_used * page_bytes,
                max_bytes=host.index.num_ready * page_bytes,
                num_incoming=len(host.storing),
                num_outgoing=len(host.arriving),
                num_waiting=len(host.gates),
                num_hit_tokens=host.num_found_tokens,
                num_evictions=host.index.num_evictions,
                num_errors=0,
                is_paused=False,
            )
        )
    if disk is not None:
        status, counts = disk.facts.status, disk.facts.counts
        tiers.append(
            KvTier(
                "disk",
                num_blocks=status.num_blocks,
                num_bytes=status.num_bytes,
                max_bytes=status.max_bytes,
                num_incoming=disk.num_writing,
                num_outgoing=disk.num_reading,
                num_waiting=len(disk.waits),
                num_hit_tokens=disk.num_found_tokens,
                num_evictions=counts.num_evicted,
                num_errors=counts.num_errors,
                is_paused=status.is_paused,
            )
        )
    return tiers
