"""A toy model with layers of several kinds: its next token is a hash of exactly what each of them would read.

LayeredModel says what must come of a prompt. LayeredExecutor computes the same from pages, as late as a device may, and
spoils a page at the moment when it is handed out. So a page given back too early, a window too short, a state of the
wrong tokens, or a page with another kind's bytes changes a token.

Keys and values are whole numbers, each with position, token, adapter, group and table in it. What a layer reads is a
tuple of them, and Python's hash of it is quick and the same in every process: random traces live by their number.
"""

import zlib
from collections.abc import Sequence

from engine.core.host_index import HostIndex
from engine.core.scheduler import Scheduler
from engine.core.step import RequestInit, RowPlan, StepPlan, StepResult
from engine.interface.config import CacheGroup
from engine.interface.protocol import SamplingParams
from tests.support.engine_harness import VOCAB_SIZE, CheckedExecutor

_ZEROED, _SPOILED = 0, 1  # bytes that are no keys and values
_KIND_BITS = {"full": 1, "window": 2, "state": 4}


def layered_kv(position: int, token_id: int, lora_index: int) -> int:
    """Return a token's keys and values in table 0 of group 0; `+ place_of(g, i)` for those of others."""
    return ((position + 1) * 64 + token_id) * 128 + 32 * lora_index


def place_of(g: int, i: int) -> int:
    """Return what distinguishes bytes of table i of group g."""
    return 8 * g + i


def fold(state: int, kvs: Sequence[int]) -> int:
    """Advance a recurrent state by tokens."""
    for kv in kvs:
        state = hash((state, kv))
    return state


def next_token(views: tuple[object, ...], count: int) -> int:
    """Return the token that follows what the groups see."""
    return hash(views) % count


def first_seen(group: CacheGroup, num_tokens: int) -> int:
    """Return the first position that the last of so many tokens sees."""
    if group.chunk is not None:
        return (num_tokens - 1) // group.chunk * group.chunk
    return max(num_tokens - (group.window or num_tokens), 0)


class LayeredText:
    """A text as the layers of these groups see it."""

    def __init__(self, groups: Sequence[CacheGroup], tokens: Sequence[int], lora_index: int) -> None:
        self.num_tokens = 0
        self._groups = groups
        self._lora_index = lora_index
        self._tables: list[list[list[int]]] = [
            [[] for _ in range(0 if group.kind == "state" else group.pages_per_block)] for group in groups
        ]
        self._places = [(table, place_of(g, i)) for g, of_g in enumerate(self._tables) for i, table in enumerate(of_g)]
        self._states = dict.fromkeys((g for g, group in enumerate(groups) if group.kind == "state"), 0)
        for token_id in tokens:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Add a token."""
        kv = layered_kv(self.num_tokens, token_id, self._lora_index)
        self.num_tokens += 1
        for table, place in self._places:
            table.append(kv + place)
        for g, state in self._states.items():
            self._states[g] = fold(state, (kv,))

    @property
    def next_token(self) -> int:
        """What follows."""
        return next_token(
            tuple(
                self._states[g]
                if g in self._states
                else tuple(tuple(table[first_seen(group, self.num_tokens) :]) for table in self._tables[g])
                for g, group in enumerate(self._groups)
            ),
            VOCAB_SIZE,
        )


class LayeredModel:
    """Layers of these groups, without batch, pages or cache."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = groups
        self._known: dict[tuple[object, ...], list[int]] = {}

    def expected_tokens(
        self, prompt: list[int], params: SamplingParams, *, max_num_tokens: int, lora_index: int = 0
    ) -> list[int]:
        """Return what any correct engine generates."""
        key = (tuple(prompt), params.max_tokens, tuple(params.stop_token_ids), max_num_tokens, lora_index)
        if key not in self._known:
            self._known[key] = self._generate(prompt, params, max_num_tokens, lora_index)
        return self._known[key]

    def _generate(self, prompt: list[int], params: SamplingParams, max_num_tokens: int, lora_index: int) -> list[int]:
        tokens: list[int] = []
        text = LayeredText(self.groups, prompt, lora_index)
        while text.num_tokens < min(len(prompt) + params.max_tokens, max_num_tokens):
            tokens.append(text.next_token)
            if tokens[-1] in params.stop_token_ids:
                break
            text.append(tokens[-1])
        return tokens


class LayeredProposer:
    """Proposes what the model will sample without an adapter, but for every fourth token or so."""

    def __init__(self, model: LayeredModel) -> None:
        self._model = model

    def propose(self, prompt_token_ids: list[int], output_token_ids: list[int], count: int) -> list[int]:
        """See Proposer.propose."""
        text = LayeredText(self._model.groups, prompt_token_ids + output_token_ids, 0)
        num_known, drafts = text.num_tokens, []
        for _ in range(count):
            token_id = text.next_token
            luck = zlib.crc32(f"{num_known} {text.num_tokens} {token_id}".encode()) % 8
            drafts.append((token_id + (luck < 2)) % VOCAB_SIZE)
            text.append(drafts[-1])
        return drafts


class _Row:
    """What a device keeps of one request, besides the fake's."""

    def __init__(self) -> None:
        self.tables: dict[int, dict[int, int]] = {}  # by table: page by column
        self.state_len = 0
        self.inputs: list[int] = []  # of a drafted row: its tokens, which the state has not taken in
        self.states: dict[tuple[int, int], int] = {}  # by group and number of tokens, of the rows computed


class LayeredExecutor(CheckedExecutor):
    """Computes a LayeredModel from the pages that the plans name."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.groups = scheduler.config.cache_groups
        self._has_states = any(group.kind == "state" for group in self.groups)
        num_tables = [group.num_tables for group in self.groups]
        self._first_tables = [sum(num_tables[:g]) for g in range(len(self.groups))]
        num_pages = scheduler.config.num_pages
        self._num_slots = max(1, *(group.block_tokens for group in self.groups))
        self._memory = [[_ZEROED] * self._num_slots for _ in range(num_pages)]  # by page: what each slot has
        self._kinds = [0] * num_pages  # bits of those that wrote to it since it was zeroed
        self._layered: dict[int, _Row] = {}  # by req_index
        self.num_restored = self.num_saved = self.num_zeroed = self.num_grouped = 0
        pool = scheduler.kv.pool
        take = pool.take

        def spoil(group: int) -> int:
            block = take(group)
            for page in pool.pages(block):
                self._memory[page] = [_SPOILED] * self._num_slots
            return block

        pool.take = spoil
        self._host: list[tuple[list[int], int]] = []  # by slot of host memory: what a page had, and its kinds
        self.num_to_host = self.num_from_host = 0
        if scheduler.kv.tiers.host is not None:
            self._spoil_host(scheduler.kv.tiers.host.index)

    def _spoil_host(self, index: HostIndex) -> None:
        """Spoil a slot of host memory at the moment when it is handed out."""
        spoiled = ([_SPOILED] * self._num_slots, 0)
        self._host = [spoiled] * index.num_slots
        take = index.take

        def spoil(count: int) -> list[int] | None:
            slots = take(count)
            for slot in slots or ():
                self._host[slot] = spoiled
            return slots

        index.take = spoil

    def _execute(self, plan: StepPlan, allowed: dict[int, list[int]]) -> StepResult:
        result = super()._execute(plan, allowed)
        self.num_grouped += sum(self._rows[row.req_index].leader is not None for row in self._plan_rows)
        if plan.step_id % 2:
            self._copy_beside(plan)
        return result

    def _copy_beside(self, plan: StepPlan) -> None:
        """Copy to and from the host: before the rows of one step, and behind those of the next."""
        if not (plan.copies_from_host or plan.copies_to_host):
            return
        targets = [page for _, page in plan.copies_from_host] + [page for page, _ in plan.copies_to_host]
        assert len(set(targets)) == len(targets)
        assert not {slot for slot, _ in plan.copies_from_host} & {slot for _, slot in plan.copies_to_host}
        for slot, page in plan.copies_from_host:
            memory, self._kinds[page] = self._host[slot]
            self._memory[page] = list(memory)
        for page, slot in plan.copies_to_host:
            self._host[slot] = (list(self._memory[page]), self._kinds[page])
        self.num_from_host += len(plan.copies_from_host)
        self.num_to_host += len(plan.copies_to_host)

    def _prepare(self, plan: StepPlan) -> None:
        for init in plan.inits:
            self._init(init)
        for row in self._plan_rows:
            if not row.new_blocks:
                continue
            layered = self._layered[row.req_index]
            for table, first, pages in row.new_blocks:
                assert 0 not in pages, "page 0 belongs to padding rows"
                layered.tables.setdefault(table, {}).update(enumerate(pages, first))
        for page in plan.zeroed:
            self._memory[page], self._kinds[page] = [_ZEROED] * self._num_slots, 0
        self.num_zeroed += len(plan.zeroed)
        if plan.step_id % 2 == 0:
            self._copy_beside(plan)
        self._copy(plan.copies_in)
        self._copy(plan.copies_out)  # before drafts are settled, as engine/device/model_runner.py does
        starting = {init.req_index for init in plan.inits}
        for row in self._plan_rows:
            self._settle(row, self._layered[row.req_index], is_first=row.req_index in starting)
        self.num_restored += len(plan.copies_in)
        self.num_saved += len(plan.copies_out)

    def _init(self, init: RequestInit) -> None:
        self._layered[init.req_index] = _Row()

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            self._memory[target], self._kinds[target] = list(self._memory[source]), self._kinds[source]

    def _settle(self, row: RowPlan, layered: _Row, *, is_first: bool) -> None:
        """Bring the states to the row's start, by the inputs of a drafted row before it."""
        if is_first:
            layered.state_len = row.start
        if layered.inputs:
            taken, layered.inputs = layered.inputs[: row.start - layered.state_len], []
            for g, group in enumerate(self.groups):
                if group.kind == "state":
                    self._store(g, layered, fold(self._load(g, layered), taken))
            layered.state_len += len(taken)
        assert layered.state_len == row.start or not self._has_states

    def _next_token(self, history: object, count: int) -> int:
        return next_token(history, count)

    def _write(self, row: RowPlan, state) -> None:
        layered = self._layered[row.req_index]
        state.layered = layered
        start, memory, all_kinds = row.start, self._memory, self._kinds
        kvs = [
            layered_kv(position, token_id, state.lora_index)
            for position, token_id in enumerate(self._token_ids(row, state), start)
        ]
        for g, group in enumerate(self.groups):
            if group.kind == "state":
                self._advance(g, row, layered, kvs)
                continue
            size, kind = group.block_tokens, _KIND_BITS[group.kind]
            for i in range(group.pages_per_block):
                table, place = layered.tables[self._first_tables[g] + i], place_of(g, i)
                for position, kv in enumerate(kvs, start):
                    page = table[position // size]
                    memory[page][position % size] = kv + place
                    all_kinds[page] |= kind
        if row.num_drafts:
            layered.inputs = kvs
        else:
            layered.state_len = start + len(kvs)

    def _advance(self, g: int, row: RowPlan, layered: _Row, kvs: list[int]) -> None:
        """Compute the states behind each of the row's tokens; keep the last one, unless some tokens are drafts."""
        state = self._load(g, layered) if row.start else 0
        for count, kv in enumerate(kvs, 1):
            state = fold(state, (kv,))
            layered.states[g, row.start + count] = state
        if not row.num_drafts:
            self._store(g, layered, state)

    def _load(self, g: int, layered: _Row) -> int:
        """Return the live state that its pages agree on, or a wrong one."""
        pages = layered.tables[self._first_tables[g]]
        pieces = [self._memory[pages[i]][0] for i in range(self.groups[g].pages_per_block)]
        state = pieces[0] >> 5
        return state if pieces == [(state << 5) + place_of(g, i) for i in range(len(pieces))] else 1

    def _store(self, g: int, layered: _Row, state: int) -> None:
        for i, page in layered.tables[self._first_tables[g]].items():
            self._memory[page][0] = (state << 5) + place_of(g, i)
            self._kinds[page] = _KIND_BITS["state"]

    def _read(self, state, num_tokens: int) -> tuple[object, ...]:
        return tuple(
            state.layered.states[g, num_tokens]
            if group.kind == "state"
            else self._attend(g, group, state, first_seen(group, num_tokens), num_tokens)
            for g, group in enumerate(self.groups)
        )

    def _attend(self, g: int, group: CacheGroup, state, start: int, end: int) -> object:
        """Return what tokens start to end have, by table. Bytes of another kind beside them are no numbers.

        What rows of a group share is read by the first one's table.
        """
        size, views = group.block_tokens, []
        layered: _Row = state.layered
        num_shared = 0 if state.leader is None or group.kind != "full" else state.share[1] // size
        first, last = start // size, (end - 1) // size
        for i in range(group.pages_per_block):
            table = layered.tables[self._first_tables[g] + i]
            shared = table if state.leader is None else state.leader.layered.tables[self._first_tables[g] + i]
            entries: list[int] = []
            kinds = 0
            for column in range(first, last + 1):
                page = (shared if column < num_shared else table)[column]
                kinds |= self._kinds[page]
                entries += self._memory[page][:size]
            if kinds != _KIND_BITS[group.kind]:
                return kinds
            views.append(tuple(entries[start - first * size : end - first * size]))
        return tuple(views)
