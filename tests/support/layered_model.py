"""A toy model with layers of several kinds: its next token is a hash of exactly what each of them would read.

LayeredModel says what must come of a prompt. LayeredExecutor computes the same from pages, as late as a device may, and
spoils a page at the moment when it is handed out. So a page given back too early, a window too short, a state of the
wrong tokens, or a page with another kind's bytes changes a token.
"""

import zlib
from collections.abc import Sequence
from itertools import chain

from engine.core.scheduler import Scheduler
from engine.core.step import RequestInit, RowPlan, StepPlan
from engine.interface.config import CacheGroup
from engine.interface.protocol import SamplingParams
from tests.support.engine_harness import VOCAB_SIZE, CheckedExecutor
from tests.support.fake_executor import fake_kv, fake_token

Kv = tuple[int, int]


def fold(state: int, kvs: Sequence[Kv]) -> int:
    """Advance a recurrent state by tokens."""
    for kv in kvs:
        state = zlib.crc32(repr(kv).encode(), state)
    return state


def first_seen(group: CacheGroup, num_tokens: int) -> int:
    """Return the first position that the last of so many tokens sees."""
    if group.chunk is not None:
        return (num_tokens - 1) // group.chunk * group.chunk
    return max(num_tokens - (group.window or num_tokens), 0)


class LayeredModel:
    """Layers of these groups, without batch, pages or cache."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = groups
        self._known: dict[tuple[object, ...], list[int]] = {}

    def view(self, kvs: Sequence[Kv]) -> list[object]:
        """Return what the last of these tokens sees, by group."""
        return [
            fold(0, kvs) if group.kind == "state" else list(kvs[first_seen(group, len(kvs)) :]) for group in self.groups
        ]

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
        kvs = [fake_kv(position, token_id, lora_index) for position, token_id in enumerate(prompt)]
        while len(kvs) < min(len(prompt) + params.max_tokens, max_num_tokens):
            tokens.append(fake_token(self.view(kvs), VOCAB_SIZE))
            if tokens[-1] in params.stop_token_ids:
                break
            kvs.append(fake_kv(len(kvs), tokens[-1], lora_index))
        return tokens


class LayeredProposer:
    """Proposes what the model will sample without an adapter, but for every fourth token or so."""

    def __init__(self, model: LayeredModel) -> None:
        self._model = model

    def propose(self, prompt_token_ids: list[int], output_token_ids: list[int], count: int) -> list[int]:
        """See Proposer.propose."""
        tokens = prompt_token_ids + output_token_ids
        num_known = len(tokens)
        for _ in range(count):
            token_id = fake_token(self._model.view(list(enumerate(tokens))), VOCAB_SIZE)
            luck = zlib.crc32(f"{num_known} {len(tokens)} {token_id}".encode()) % 8
            tokens.append((token_id + (luck < 2)) % VOCAB_SIZE)
        return tokens[num_known:]


class _Row:
    """What a device keeps of one request, besides the fake's."""

    def __init__(self) -> None:
        self.tables: dict[int, dict[int, int]] = {}  # by table: page by column
        self.state_len = 0
        self.inputs: list[Kv] = []  # of a drafted row: its tokens, which the state has not taken in
        self.states: dict[tuple[int, int], int] = {}  # by group and number of tokens, of the rows computed


class LayeredExecutor(CheckedExecutor):
    """Computes a LayeredModel from the pages that the plans name."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.groups = scheduler.config.cache_groups
        num_tables = [group.num_tables for group in self.groups]
        self._first_tables = [sum(num_tables[:g]) for g in range(len(self.groups))]
        num_pages = scheduler.config.num_pages
        self._memory: list[dict[int, object]] = [{} for _ in range(num_pages)]  # by page: what each slot has
        self._kinds: list[set[str]] = [set() for _ in range(num_pages)]  # that wrote to it since it was zeroed
        self._layered: dict[int, _Row] = {}  # by req_index
        self.num_restored = self.num_saved = self.num_zeroed = 0
        pool = scheduler.kv.pool
        take = pool.take

        def spoil(group: int) -> int:
            block = take(group)
            for page in pool.pages(block):
                self._memory[page] = dict.fromkeys(range(64), "spoiled")
            return block

        pool.take = spoil

    def _prepare(self, plan: StepPlan) -> None:
        for init in plan.inits:
            self._init(init)
        for row in plan.rows:
            layered = self._layered[row.req_index]
            for table, first, pages in row.new_blocks:
                assert 0 not in pages, "page 0 belongs to padding rows"
                layered.tables.setdefault(table, {}).update(enumerate(pages, first))
        for page in plan.zeroed:
            self._memory[page], self._kinds[page] = {}, set()
        self.num_zeroed += len(plan.zeroed)
        self._copy(plan.copies_in)
        starting = {init.req_index for init in plan.inits}
        for row in plan.rows:
            self._settle(row, self._layered[row.req_index], is_first=row.req_index in starting)
        self._copy(plan.copies_out)
        self.num_restored += len(plan.copies_in)
        self.num_saved += len(plan.copies_out)

    def _init(self, init: RequestInit) -> None:
        self._layered[init.req_index] = _Row()

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            self._memory[target], self._kinds[target] = dict(self._memory[source]), set(self._kinds[source])

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

    @property
    def _has_states(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    def _write(self, row: RowPlan, state) -> None:
        layered = self._layered[row.req_index]
        state.layered = layered
        token_ids = self._token_ids(row, state)
        kvs = [fake_kv(position, token_id, state.lora_index) for position, token_id in enumerate(token_ids, row.start)]
        for g, group in enumerate(self.groups):
            if group.kind == "state":
                self._advance(g, row, layered, kvs)
                continue
            for kv in kvs:
                for i in range(group.pages_per_block):
                    page = layered.tables[self._first_tables[g] + i][kv[0] // group.block_tokens]
                    self._memory[page][kv[0] % group.block_tokens] = (g, i, kv)
                    self._kinds[page].add(group.kind)
        if row.num_drafts:
            layered.inputs = kvs
        else:
            layered.state_len = row.start + len(kvs)

    def _advance(self, g: int, row: RowPlan, layered: _Row, kvs: list[Kv]) -> None:
        """Compute the states behind each of the row's tokens; keep the last one, unless some tokens are drafts."""
        state = self._load(g, layered) if row.start else 0
        for count in range(1, len(kvs) + 1):
            state = fold(state, kvs[count - 1 : count])
            layered.states[g, row.start + count] = state
        if not row.num_drafts:
            self._store(g, layered, state)

    def _load(self, g: int, layered: _Row) -> int:
        """Return the live state that its pages agree on, or a wrong one."""
        pages = layered.tables[self._first_tables[g]]
        pieces = [self._memory[pages[i]].get(0) for i in range(self.groups[g].pages_per_block)]
        state = pieces[0][2] if isinstance(pieces[0], tuple) else 1
        return state if pieces == [(g, i, state) for i in range(len(pieces))] else 1

    def _store(self, g: int, layered: _Row, state: int) -> None:
        for i, page in layered.tables[self._first_tables[g]].items():
            self._memory[page][0] = (g, i, state)
            self._kinds[page] = {"state"}

    def _read(self, state, num_tokens: int) -> list[object]:
        layered: _Row = state.layered
        return [
            layered.states[g, num_tokens]
            if group.kind == "state"
            else self._attend(g, layered, range(first_seen(group, num_tokens), num_tokens))
            for g, group in enumerate(self.groups)
        ]

    def _attend(self, g: int, layered: _Row, positions: range) -> list[object]:
        """Return the tokens at these positions. Bytes of another kind beside them are no numbers."""
        group = self.groups[g]
        tables = [layered.tables[self._first_tables[g] + i] for i in range(group.pages_per_block)]
        columns = range(positions.start // group.block_tokens, (positions.stop - 1) // group.block_tokens + 1)
        kinds = set(chain.from_iterable(self._kinds[table[column]] for table in tables for column in columns))
        if kinds != {group.kind}:
            return sorted(kinds)
        seen: list[object] = []
        for position in positions:
            column, slot = divmod(position, group.block_tokens)
            entries = [self._memory[table[column]].get(slot) for table in tables]
            kv = entries[0][2] if isinstance(entries[0], tuple) else None
            seen.append(kv if entries == [(g, i, kv) for i in range(len(tables))] else entries)
        return seen
