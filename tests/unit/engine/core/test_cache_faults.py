"""The traces find planted faults, by wrong tokens alone: the invariants are not checked here."""

import copy
import logging
from dataclasses import replace

import pytest

from engine.core.kv_caches import KvCaches
from engine.core.planned_step import add_drafts
from engine.core.request import BlockTable, Request
from tests.support.cache_traces import KINDS, STATE_KINDS, Trace

MOST_TRACES = 1000


def free_at_once(harness, _):
    """Give blocks back when a request ends, not at the commit of its last step."""
    scheduler, kv, early = harness.scheduler, harness.scheduler.kv, set()
    retire, commit_row = scheduler._retire, kv.commit_row

    def retire_at_once(request):
        if request in early:
            early.remove(request)
            request.tables = [BlockTable([]) for _ in request.tables]
        elif request.last_step > scheduler.committed_step_id:
            early.add(request)
            kv.pool.release([block for table in request.tables for block in table.blocks])
        retire(request)

    scheduler._retire = retire_at_once
    kv.commit_row = lambda request, end: None if request in early else commit_row(request, end)


def release_by_the_planned_end(harness, _):
    """Let window blocks go that the newest planned row does not read, though an older one may."""
    kv = harness.scheduler.kv
    commit_row = kv.commit_row

    def commit(request, end):
        commit_row(request, end)
        for group in kv.layout.windows:
            table, first = request.tables[group.index], group.first_block(request.num_computed_tokens)
            if table.first < first <= table.end:
                kv._release_until(first, request, table, group)

    kv.commit_row = commit


def publish_before_the_commit(harness, _):
    """Let others find the blocks of a row as soon as it is planned."""
    kv = harness.scheduler.kv
    begin_row = kv.begin_row

    def begin(request, end, step, **reserved):
        added = begin_row(request, end, step, **reserved)
        known = min(end, len(request.prompt_token_ids) + len(request.output_token_ids))
        if kv._is_caching:
            request.extend_hashes(known, unit=kv.layout.unit)
            for group in kv.layout.growing:
                kv._publish(request, request.tables[group.index], group, known)
        return added

    kv.begin_row = begin


def take_hits_that_the_windows_do_not_supply(harness, monkeypatch):
    """Look for one block of each window only."""
    kv = harness.scheduler.kv
    layout = copy.copy(kv.layout)
    layout.windows = [replace(group, window=2) for group in layout.windows]
    kv._finder._layout = layout

    def new_table(self, group, hit):
        blocks, end = hit.blocks[group.index], hit.num_tokens // group.tokens
        first = min(group.first_block(hit.num_tokens), end - len(blocks))
        blocks = blocks[:1] * (end - first - len(blocks)) + blocks  # any will do for the others
        self.pool.hold(blocks[: end - first - len(hit.blocks[group.index])])
        return BlockTable(blocks, end - len(blocks), end, end - len(blocks))

    monkeypatch.setattr(KvCaches, "_new_table", new_table)


def forget_the_adapter(harness, monkeypatch):
    """Share prefixes between adapters."""
    root_hash = Request.root_hash

    def without(request):
        index, request.lora_index = request.lora_index, 0
        found = root_hash(request)
        request.lora_index = index
        return found

    monkeypatch.setattr(Request, "root_hash", without)


def zero_nothing(harness, _):
    """Hand out pages with another kind's bytes."""
    harness.scheduler.kv.pool._lend = lambda pages, kind: None


def let_rejected_drafts_into_the_state(harness, _):
    """Keep the state behind a drafted row's last token."""
    executor = harness.executor
    write = executor._write

    def write_and_store(row, state):
        write(row, state)
        layered = executor._layered[row.req_index]
        layered.inputs = []
        layered.state_len = row.start + row.num_tokens
        for g, group in enumerate(executor.groups):
            if group.kind == "state":
                executor._store(g, layered, layered.states[g, layered.state_len])

    def settle(row, layered, *, is_first):
        layered.state_len = row.start

    executor._write, executor._settle = write_and_store, settle


def settle_all_drafts(harness, _):
    """Take the inputs of all of a drafted row's tokens into the state, not those before the next row's start."""
    executor = harness.executor
    settle = executor._settle

    def settle_all(row, layered, *, is_first):
        settle(replace_start(row, max(row.start, layered.state_len + len(layered.inputs))), layered, is_first=is_first)
        layered.state_len = row.start

    executor._settle = settle_all


def settle_nothing(harness, _):
    """Forget the inputs of a drafted row."""

    def forget(row, layered, *, is_first):
        layered.inputs, layered.state_len = [], row.start

    harness.executor._settle = forget


def save_behind_the_row(harness, _):
    """Copy the state of a checkpoint when its row has been computed."""
    executor = harness.executor
    execute, copy_pages = executor._execute, executor._copy

    def execute_and_copy(plan, allowed):
        executor._copy = lambda copies: copy_pages(copies) if copies is not plan.copies_out else None
        result = execute(plan, allowed)
        copy_pages(plan.copies_out)
        return result

    executor._execute = execute_and_copy


def save_behind_drafts(harness, patch):
    """Save the state of an answer though a drafted row came before, which the state has not taken in."""
    caches = harness.scheduler.kv
    save = caches.save_in_answer

    def save_though_drafted(request, step, *, num_reserved):
        last, request.last_step = request.last_step, -2
        save(request, step, num_reserved=num_reserved)
        request.last_step = last

    def add_one_more(row, request, *args, **limits):
        request.next_save_tokens += 1
        add_drafts(row, request, *args, **limits)
        request.next_save_tokens -= 1

    caches.save_in_answer = save_though_drafted
    patch.setattr("engine.core.scheduler.add_drafts", add_one_more)


def let_the_source_of_a_restore_go(harness, _):
    """Release a saved state when its copy is planned."""
    checkpoints = harness.scheduler.kv.checkpoints
    restore = checkpoints._restore

    def restore_and_release(request, step):
        restore(request, step)
        checkpoints._pool.release(step.restored)
        step.restored.clear()

    checkpoints._restore = restore_and_release


def begin_with_what_is_there(harness, _):
    """Do not begin the state of a text at zero."""
    executor = harness.executor
    executor._advance = lambda g, row, layered, kvs: type(executor)._advance(
        executor, g, replace_start(row, max(row.start, 1)), layered, kvs
    )


def replace_start(row, start):
    """Return the row as if it started elsewhere."""
    moved = copy.copy(row)
    moved.start = start
    return moved


def restore_nothing(harness, _):
    """Go on from an empty state behind a hit."""
    executor = harness.executor
    copy_pages = executor._copy
    prepare = executor._prepare

    def prepare_without(plan):
        executor._copy = lambda copies: copy_pages(copies) if copies is not plan.copies_in else None
        prepare(plan)

    executor._prepare = prepare_without


def publish_states_before_the_commit(harness, _):
    """Let others find the states that a row is to save as soon as it is planned."""
    kv = harness.scheduler.kv
    begin_row = kv.begin_row

    def begin(request, end, step, **reserved):
        known = len(step.saves)
        added = begin_row(request, end, step, **reserved)
        for save in step.saves[known:]:
            key = kv.checkpoints._key(request, save.num_tokens)
            if kv.pool.find(save.group.index, key) is None:
                kv.pool.publish(save.group.index, key, save.block)
                kv.checkpoints._num_hits[save.block] = 0
        return added

    kv.begin_row = begin


def publish_states_of_steps_given_up(harness, _):
    """Keep what a dropped step was to save."""
    kv = harness.scheduler.kv
    kv.end_step = lambda step, published=(): kv.checkpoints.end_step(step, [*step.saves])


def find_on_the_host_before_the_commit(harness, _):
    """Let requests find blocks in host memory as soon as their copies are planned."""
    tier = harness.scheduler.kv.tiers.host
    plan, add = tier.plan, tier.index.add

    def plan_and_add(**reserved):
        copies = plan(**reserved)
        for store in () if copies is None else copies.stores:
            add(store.name, store.slots)
        return copies

    tier.plan = plan_and_add
    tier.index.add = lambda name, slots: None
    tier.index.give_back = lambda slots: None
    tier.index.take = without_loss(tier.index)


def without_loss(index):
    """Return HostIndex.take, which frees the slots of evicted blocks though give_back() does nothing."""
    take, give_back = index.take, type(index).give_back

    def take_freed(count):
        index.give_back = lambda slots: give_back(index, slots)
        slots = take(count)
        index.give_back = lambda slots: None
        return slots

    return take_freed


def let_the_page_of_a_copy_to_the_host_go(harness, _):
    """Release a block when its copy to the host is planned."""
    tier = harness.scheduler.kv.tiers.host
    plan = tier.plan

    def plan_and_release(**reserved):
        copies = plan(**reserved)
        if copies is not None:
            tier._pool.release(store.block for store in copies.stores)
            for store in copies.stores:
                tier.storing.remove(store.name)
            kept, copies.stores = copies.stores, []
            for store in kept:
                if tier.index.find(store.name) is None:
                    tier.index.add(store.name, store.slots)
        return copies

    tier.plan = plan_and_release


def publish_what_is_due_from_the_host(harness, _):
    """Let others find blocks before their copies from the host have ended."""
    tier = harness.scheduler.kv.tiers.host
    await_arrival = tier._await

    def await_and_publish(gate, name):
        block = await_arrival(gate, name)
        tier._pool.publish(*name, block)
        harness.scheduler.kv.checkpoints.adopt(block)
        return block

    tier._await = await_and_publish


def reuse_a_slot_that_a_copy_reads(harness, _):
    """Evict blocks from host memory though copies from it are due."""
    index = harness.scheduler.kv.tiers.host.index
    index.begin_reading = lambda block: None
    index.end_reading = lambda block: None


FAULTS = {
    free_at_once: KINDS,
    release_by_the_planned_end: KINDS,
    publish_before_the_commit: KINDS,
    take_hits_that_the_windows_do_not_supply: KINDS,
    forget_the_adapter: KINDS,
    zero_nothing: KINDS,
    let_rejected_drafts_into_the_state: STATE_KINDS,
    settle_all_drafts: STATE_KINDS,
    settle_nothing: STATE_KINDS,
    save_behind_the_row: STATE_KINDS,
    save_behind_drafts: STATE_KINDS,
    let_the_source_of_a_restore_go: STATE_KINDS,
    begin_with_what_is_there: STATE_KINDS,
    restore_nothing: STATE_KINDS,
    publish_states_of_steps_given_up: STATE_KINDS,
    publish_states_before_the_commit: STATE_KINDS,
}
FAULTS_OF_TIERS = (
    find_on_the_host_before_the_commit,
    let_the_page_of_a_copy_to_the_host_go,
    publish_what_is_due_from_the_host,
    reuse_a_slot_that_a_copy_reads,
)
# these show in few of the traces, so it takes seconds to find one
RARE = (let_the_page_of_a_copy_to_the_host_go, reuse_a_slot_that_a_copy_reads, save_behind_drafts)
FAILURES = {  # they show when steps are given up
    publish_before_the_commit: 40,
    publish_states_of_steps_given_up: 40,
    publish_states_before_the_commit: 40,
    find_on_the_host_before_the_commit: 40,
}


def rare_ones_marked(faults):
    return [pytest.param(fault, marks=pytest.mark.full) if fault in RARE else fault for fault in faults]


def is_caught(trace, fault, monkeypatch, *, is_drafting=False):
    """Return whether a replay with the fault ends with a wrong token."""

    with monkeypatch.context() as patch:

        def plant(harness):
            harness.scheduler.check = lambda: None
            fault(harness, patch)

        trace.failures = max(trace.failures, FAILURES.get(fault, 0))
        try:
            trace.replay(depth=2, num_drafts=trace.num_drafts * is_drafting, change=plant)
        except AssertionError as error:
            return "wrong tokens" in str(error)
        except (IndexError, KeyError, ValueError):  # the books are wrong, too
            return False
        return False


@pytest.mark.slow
@pytest.mark.parametrize("fault", rare_ones_marked(FAULTS), ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    logging.disable(logging.CRITICAL)
    try:
        traces = (Trace.draw(seed, FAULTS[fault]) for seed in range(MOST_TRACES))
        assert any(is_caught(trace, fault, monkeypatch, is_drafting=b) for trace in traces for b in (False, True))
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("fault", rare_ones_marked(FAULTS_OF_TIERS), ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_host_memory_is_caught(fault, monkeypatch):
    logging.disable(logging.CRITICAL)
    try:
        traces = (Trace.draw(seed, KINDS, is_tiered=True) for seed in range(MOST_TRACES))
        assert any(is_caught(trace, fault, monkeypatch) for trace in traces)
    finally:
        logging.disable(logging.NOTSET)
