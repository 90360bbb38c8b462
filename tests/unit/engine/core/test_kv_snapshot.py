"""What a snapshot says of the pool is what its owner knows, in any trace; tables survive their encoding."""

import threading
from array import array
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from engine.core.kv_snapshot import MAX_LISTED, KvView, TableRuns, count_in_tables, encode_runs
from engine.core.request import BlockTable, Request
from engine.interface.config import CacheGroup
from engine.interface.errors import UnsupportedFeature
from engine.interface.kv_snapshot import KvGroup, KvSnapshot, KvStates
from engine.interface.protocol import AskKv, ClientGone, FromEngine, GrammarSpec
from engine.interface.transport import FrameDecoder, encode_frame
from tests.support.cache_traces import Trace
from tests.support.engine_harness import Harness
from tests.support.stepping import add, make_scheduler, step
from tests.unit.engine.test_traces import EngineTraces


def blocks_of(runs):
    """Walk runs: pairs of a first block and a count, which is negative if they go downwards."""
    return [
        first + step * index
        for first, count in zip(runs[::2], runs[1::2], strict=True)
        for step in [1 if count > 0 else -1]
        for index in range(abs(count))
    ]


def ints(data):
    runs = array("i")
    runs.frombytes(data)
    return runs.tolist()


def tables_of(snapshot):
    """Return every request's blocks, by request_id."""
    runs, tables = ints(snapshot.runs), {}
    for row in snapshot.requests:
        tables[row.request_id] = blocks_of(runs[: 2 * row.num_runs])
        del runs[: 2 * row.num_runs]
    assert runs == []
    return tables


def blocks_held(request):
    """Return the blocks of a request's only table."""
    return request.tables[0].blocks if request.tables else []


def check_against(scheduler, snapshot):
    """Compare a snapshot with the pool's own books."""
    pool = scheduler.kv.pool
    counts, hashes = pool._ref_counts, pool._hash_of
    tables = tables_of(snapshot)
    holders = scheduler.running + scheduler.retiring
    assert {id_: table for id_, table in tables.items() if table} == {r.request_id: blocks_held(r) for r in holders}
    everyone = range(1, pool.num_usable + 1)
    assert snapshot.num_blocks == pool.num_usable
    assert snapshot.num_used == sum(counts[b] > 0 for b in everyone)
    assert snapshot.num_shared == sum(counts[b] > 1 for b in everyone)
    assert blocks_of(ints(snapshot.cached_runs)) == [b for b in everyone if not counts[b] and hashes[b] is not None]
    assert snapshot.num_cached == len(blocks_of(ints(snapshot.cached_runs)))
    requests = {request.request_id: request for request in [*holders, *scheduler.waiting.requests]}
    assert [row.request_id for row in snapshot.requests] == list(requests)
    for row in snapshot.requests:
        request = requests[row.request_id]
        assert row.state == request.status.value
        assert row.num_blocks == len(blocks_held(request)) == len(tables[row.request_id])
        assert row.num_shared_blocks == sum(counts[b] > 1 for b in blocks_held(request))
        assert row.num_computed_tokens == request.num_computed_tokens
        assert (row.num_prompt_tokens, row.num_output_tokens) == (
            request.num_prompt_tokens,
            len(request.output_token_ids),
        )
        assert row.num_preemptions == request.num_preemptions
        assert row.age_s >= 0


class KvTraces(EngineTraces):
    """The same random traces; after each of their steps one view that watches all along, and a fresh one, are right."""

    @invariant()
    def snapshots_are_true(self):
        if not hasattr(self, "harness"):
            return
        scheduler = self.harness.scheduler
        if not hasattr(self, "view"):
            self.view = KvView(scheduler, {}, bytes_per_block=3, clock=lambda: 1000.0)
        watching = self.view.snapshot()
        check_against(scheduler, watching)
        fresh = KvView(scheduler, {}, bytes_per_block=3, clock=lambda: 1000.0).snapshot()
        assert tables_of(fresh) == tables_of(watching)


TestKvTraces = KvTraces.TestCase
TestKvTraces.settings = settings(
    max_examples=settings.default.max_examples * 2 // 5,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def tables_without_repeats(draw):
    """Up to five tables out of one pool, of single blocks and of neighbours in both directions."""
    order = draw(st.permutations(range(8)))
    pool = []
    for place in order:
        neighbours = list(range(1 + 5 * place, 6 + 5 * place))
        how = draw(st.sampled_from(["up", "down", "mixed"]))
        pool += neighbours if how == "up" else neighbours[::-1] if how == "down" else draw(st.permutations(neighbours))
    cuts = sorted(draw(st.lists(st.integers(0, len(pool)), max_size=4)))
    return [pool[begin:end] for begin, end in pairwise([0, *cuts, len(pool)])]


@given(tables_without_repeats(), st.integers(1, 7))
def test_runs_give_back_every_table_however_it_grew(tables, step):
    for table in tables:
        runs = TableRuns(BlockTable(table))
        for begin in range(0, len(table), step):
            piece = np.array(table[begin : begin + step], np.int32)
            runs.add(array("i", encode_runs(piece, np.zeros(1, int))[0].tobytes()))
        assert blocks_of(runs.runs.tolist()) == table
    full = [table for table in tables if table]
    starts = np.cumsum([0, *map(len, full)])[:-1]
    runs, run_starts = encode_runs(np.array([b for table in full for b in table], np.int32), starts)
    assert set(starts) <= set(run_starts)
    assert blocks_of(runs.reshape(-1).tolist()) == [b for table in full for b in table]


@given(tables_without_repeats(), st.sets(st.integers(1, 40)))
def test_blocks_of_a_kind_are_counted_in_runs_of_either_direction(tables, chosen):
    parts = [encode_runs(np.array(table, np.int32), np.zeros(1, int))[0] for table in tables if table]
    runs = b"".join(part.tobytes() for part in parts)
    is_chosen = np.array([block in chosen for block in range(42)])
    counts = count_in_tables(is_chosen, runs, [len(part) for part in parts])
    assert counts == [len(chosen & set(table)) for table in tables if table]


def test_a_request_that_was_preempted_and_came_back_between_two_looks_is_walked_anew():
    scheduler = make_scheduler()
    request = add(scheduler, "a", range(12))
    step(scheduler)
    view = KvView(scheduler, {}, bytes_per_block=1, clock=lambda: 0.0)
    before = tables_of(view.snapshot())["a"]
    scheduler.kv.free(request)
    assert scheduler.kv.admit(Request("b", list(range(30, 45)), request.params))
    assert scheduler.kv.admit(request)
    assert len(blocks_held(request)) >= len(before)
    assert blocks_held(request) != before
    assert tables_of(view.snapshot())["a"] == blocks_held(request)


def test_neighbours_are_one_run_upwards_and_downwards():
    runs, starts = encode_runs(np.array([5, 6, 7, 3, 2, 1, 9, 8, 4], np.int32), np.array([0, 8]))
    assert runs.tolist() == [[5, 3], [3, -3], [9, -2], [4, 1]]
    assert starts.tolist() == [0, 3, 6, 8]


def test_nothing_is_made_until_somebody_asks_and_all_who_asked_get_the_same():
    harness = Harness()
    harness.add("a", list(range(9)))
    harness.turn(3)
    assert not [message for _, message in harness.messages if isinstance(message, KvSnapshot)]
    harness.transport.inbox += [(1, AskKv()), (1, AskKv()), (2, AskKv())]
    harness.turn()
    sent = [(client_id, message) for client_id, message in harness.messages if isinstance(message, KvSnapshot)]
    assert [client_id for client_id, _ in sent] == [1, 2]
    assert sent[0][1] is sent[1][1]
    assert [row.request_id for row in sent[0][1].requests] == ["a"]
    harness.turn(2)
    assert sum(isinstance(message, KvSnapshot) for _, message in harness.messages) == 2
    harness.drain()


def test_an_idle_engine_answers_at_once_and_a_client_that_left_does_no_harm():
    harness = Harness()
    harness.transport.inbox += [(1, AskKv()), (1, ClientGone())]
    harness.turn()
    ((_, snapshot),) = harness.messages
    assert (snapshot.num_used, snapshot.requests, snapshot.runs, snapshot.cached_runs) == (0, [], b"", b"")


def test_what_waits_has_a_row_without_blocks():
    harness = Harness(max_num_seqs=1)
    for name in "abc":
        harness.add(name, list(range(8)), max_tokens=20)
    harness.turn(2)
    snapshot = harness.engine._kv_view.snapshot()
    assert [(row.request_id, row.state, row.num_blocks > 0) for row in snapshot.requests] == [
        ("a", "running", True),
        ("b", "waiting", False),
        ("c", "waiting", False),
    ]
    harness.drain()


def test_a_pending_request_has_the_state_gate():
    is_open = threading.Event()

    def get_compiler():
        is_open.wait(60)
        raise UnsupportedFeature("no grammars here")

    harness = Harness(get_compiler=get_compiler)
    harness.add("a", [1, 2, 3], grammar=GrammarSpec("start: /x/"))
    harness.turn()
    assert [(row.request_id, row.state) for row in harness.engine._kv_view.snapshot().requests] == [("a", "gate")]
    harness.abort("a")
    harness.turn()
    assert harness.engine._kv_view.snapshot().requests == []
    is_open.set()


def test_a_long_queue_is_cut_and_the_rest_counted():
    harness = Harness(max_num_seqs=1, max_queued_requests=2000)
    for number in range(MAX_LISTED + 40):
        harness.add(f"r{number}", [1, 2, 3], max_tokens=30)
    harness.turn()
    snapshot = harness.engine._kv_view.snapshot()
    assert len(snapshot.requests) == 1 + MAX_LISTED
    assert snapshot.num_unlisted == 39


def test_a_snapshot_crosses_the_socket_as_it_was_and_holds_no_tokens():
    harness = Harness()
    harness.add("a", [41, 42, 43, 44] * 3, max_tokens=9)
    harness.turn(3)
    snapshot = harness.engine._kv_view.snapshot()
    (received,) = FrameDecoder(FromEngine).feed(encode_frame(snapshot))
    assert received == snapshot
    names = {field.name for kind in (KvSnapshot, type(snapshot.requests[0])) for field in msgspec.structs.fields(kind)}
    assert not {name for name in names if "token_id" in name or "text" in name or "prompt_ids" in name}
    harness.drain()


def test_a_window_that_moved_on_is_shown_as_it_is() -> None:
    """And what it gave back is not shown as held."""
    groups = (CacheGroup("full", 8), CacheGroup("window", 4, window=6))
    scheduler = make_scheduler(groups=groups, num_pages=40, max_num_batched_tokens=9)
    view = KvView(scheduler, {}, bytes_per_block=1, clock=lambda: 0.0)
    request = add(scheduler, "a", range(30))
    for _ in range(12):
        step(scheduler)
        snapshot = view.snapshot()
        if not request.tables:
            break
        (row,) = snapshot.requests
        full, window = request.tables
        assert blocks_of(ints(snapshot.runs)) == [*full.blocks, *window.blocks]
        assert sum(row.num_group_runs) == row.num_runs
        assert blocks_of(ints(snapshot.runs)[: 2 * row.num_group_runs[0]]) == full.blocks
        assert row.num_blocks == len(full.blocks) + len(window.blocks) == snapshot.num_used
        counts = {kind.kind: (kind.num_used, kind.num_cached) for kind in snapshot.kinds}
        assert (counts["full"][0], counts["window"][0]) == (len(full.blocks), len(window.blocks))
        assert sum(cached for _, cached in counts.values()) == snapshot.num_cached
    assert window.first > 3


def test_states_and_checkpoints_are_shown_with_their_requests() -> None:
    groups = (CacheGroup("full", 4), CacheGroup("state", 8, pages_per_block=3))
    scheduler = make_scheduler(groups=groups, num_pages=60, max_num_batched_tokens=16)
    view = KvView(scheduler, {}, bytes_per_block=1, clock=lambda: 0.0)
    first = add(scheduler, "a", range(30), max_tokens=1)
    for _ in range(2):
        step(scheduler)
    (row,) = view.snapshot().requests
    assert (row.num_state_blocks, row.restored_tokens, row.saved_tokens, row.cache_reason) == (3, 0, [], "new")
    step(scheduler)
    assert first.finish_reason
    states = view.snapshot().states
    assert states == KvStates(0, 1, 0, 3, num_made=1, num_skipped=0, num_restored=0, num_evicted=0)
    add(scheduler, "b", [*range(30), *range(100, 130)], max_tokens=9)
    for _ in range(4):
        step(scheduler)
    snapshot = view.snapshot()
    (row,) = snapshot.requests
    assert (row.num_state_blocks, row.restored_tokens, row.saved_tokens, row.cache_reason) == (3, 24, [56], "new")
    assert snapshot.states == KvStates(1, 2, 3, 6, num_made=2, num_skipped=0, num_restored=1, num_evicted=0)
    assert snapshot.groups == [KvGroup("full", 4, 1), KvGroup("state", 8, 3)]
    scheduler.kv.pool.expel(1, scheduler.running[0].block_hashes[56 // 4 - 1])
    assert view.snapshot().requests[0].saved_tokens == []


@pytest.mark.parametrize("seed", range(12))
def test_a_snapshot_shows_the_pages_of_groups_of_all_kinds(seed):
    trace = Trace.draw(seed, ["full window", "full window state", "window full full"])

    def watch(harness):
        scheduler = harness.scheduler
        pool, view = scheduler.kv.pool, KvView(scheduler, {}, bytes_per_block=3, clock=lambda: 0.0)
        turn = harness.turn

        def turn_and_look(times=1):
            turn(times)
            snapshot = view.snapshot()
            shown = tables_of(snapshot)
            for row in snapshot.requests:
                request = scheduler.requests.get(row.request_id)
                if request is not None:
                    held = [page for table in request.tables for block in table.blocks for page in pool.pages(block)]
                    assert shown[row.request_id] == held
                    assert row.num_blocks == len(held)
            assert snapshot.num_used == sum(pool.num_held) == pool.num_used
            assert snapshot.num_cached == sum(pool.num_cached) == len(blocks_of(ints(snapshot.cached_runs)))

        harness.turn = turn_and_look

    trace.replay(depth=2, change=watch)
