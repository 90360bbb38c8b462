"""Test doubles of the engine's device side, by arithmetic. Real behaviour, no mocks.

FakeExecutor    engine.core.step.Executor; expected_tokens() and expected_embedding() say what it must lead to
FakeProposer    engine.core.speculative.Proposer that knows that arithmetic, and errs now and then
"""

import zlib
from collections import deque

import msgspec
import numpy as np

from engine.core.step import NEWEST, NO_TOKEN, RowPlan, StepPlan, StepResult, TokenMasks
from engine.interface.protocol import SamplingParams, TokenLogprobs


class FakeExecutor:
    """Executor by arithmetic: each token is a hash of all tokens before it, read back through the block table.

    It keeps what a device keeps (last token and table by req_index, the pool by slot), and a step runs only when it is
    waited for, in launch order, as on a stream. So a block freed too early, a shared one overwritten, a wrong slot or
    a plan changed after its launch changes tokens, which then differ from expected_tokens(). Of a constrained row the
    hash chooses among the tokens that its mask allows. A row with drafts samples behind each of them, and spoils the
    request's last token, which the host must send next time. Rows of a group read what they share by one row's table.
    After the token `spoils` nothing is finite.
    """

    spoils: int | None = None

    def __init__(self, *, num_pages: int, block_size: int, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.plans: list[bytes] = []  # JSON, in launch order
        self._pool: list[tuple[int, int]] = [(-1, -1)] * (num_pages * block_size)  # fake_kv by slot
        self._rows: dict[int, _FakeRow] = {}  # by req_index
        self._plan_rows: list[RowPlan] = []  # of the step that runs: StepPlan.rows makes a new list each time
        self._launched: deque[_FakeStep] = deque()

    def forward(self, plan: StepPlan) -> "_FakeStep":
        """See Executor.forward."""
        assert all(step.is_sampled for step in self._launched), "a step was launched before the last one was sampled"
        self.plans.append(msgspec.json.encode(plan))
        step = _FakeStep(self, plan, self.plans[-1])
        self._launched.append(step)
        return step

    def close(self) -> None:
        """See Executor.close."""

    def run_until(self, step: "_FakeStep") -> None:
        """Execute launched steps in order, up to this one."""
        while step.result is None:
            launched = self._launched.popleft()
            assert msgspec.json.encode(launched.plan) == launched.encoded, "a plan was changed after its launch"
            self._plan_rows = launched.plan.rows
            launched.result = self._execute(launched.plan, launched.allowed)

    def _execute(self, plan: StepPlan, allowed: dict[int, list[int]]) -> StepResult:
        for req_index in plan.freed:
            self._rows.pop(req_index, None)  # named again if the plan before was given up
        for init in plan.inits:
            assert init.req_index not in self._rows, "a req_index is initialised while in use"
            self._rows[init.req_index] = _FakeRow(init.params, init.lora_index)
        self._prepare(plan)
        rows = self._plan_rows
        assert len({row.req_index for row in rows}) == len(rows), "two rows of one request"
        has_chunk = [bool(row.token_ids) for row in rows]
        assert has_chunk == sorted(has_chunk), "decode rows come first"
        for row in rows:
            self._write(row, self._rows[row.req_index])
        self._group(plan)
        result = StepResult(plan.step_id, [])
        for place, row in enumerate(rows):
            if row.prompt_logprobs is not None:
                assert row.start <= row.prompt_logprobs.start
                assert row.prompt_logprobs.start + len(row.prompt_logprobs.token_ids) <= row.start + row.num_tokens
                result.prompt_logprobs[place] = [
                    self._prompt_logprob(self._rows[row.req_index], position, token_id)
                    for position, token_id in enumerate(row.prompt_logprobs.token_ids, row.prompt_logprobs.start + 1)
                ]
            if row.pool_span is not None:
                assert not row.samples
                assert row.start <= row.pool_span.start
                assert row.pool_span.start + row.pool_span.num_tokens <= row.start + row.num_tokens
                result.pooled[place] = self._pool_hidden(row, self._rows[row.req_index])
            if row.samples:
                self._sample(row, self._rows[row.req_index], result, allowed.get(row.req_index))
        return result

    def _group(self, plan: StepPlan) -> None:
        """Have rows of a group read what they share by the first one's table."""
        for req_index, *share in plan.shares:
            self._rows[req_index].share = share
        leaders: dict[int, _FakeRow] = {}
        for row in self._plan_rows:
            state = self._rows[row.req_index]
            number, tokens = state.share
            is_member = plan.is_grouped and number and row.num_tokens == 1 and row.start + 1 > tokens
            state.leader = leaders.setdefault(number, state) if is_member else None
            assert state.leader is None or state.leader.share == state.share, "a group has one length"

    def _prepare(self, plan: StepPlan) -> None:
        """Change pages as the plan says, before its rows are computed."""
        assert not plan.copies_in
        assert not plan.copies_out
        assert not plan.copies_to_host
        assert not plan.copies_from_host
        for page in plan.zeroed:
            self._pool[page * self.block_size :][: self.block_size] = [(-1, -1)] * self.block_size

    def _write(self, row: RowPlan, state: "_FakeRow") -> None:
        for table, first, pages in row.new_blocks:
            assert (table, first) == (0, len(state.block_table))
            state.block_table += pages
        for position, token_id in enumerate(self._token_ids(row, state), row.start):
            self._pool[self._slot(state, position)] = fake_kv(position, token_id, state.lora_index)

    def _token_ids(self, row: RowPlan, state: "_FakeRow") -> list[int]:
        """Return the tokens that the row computes."""
        token_ids = row.token_ids or [NEWEST]
        assert len(token_ids) == row.num_tokens
        assert NEWEST not in token_ids[1:]
        if token_ids[0] == NEWEST:
            assert state.last_token >= 0, "the device does not know the last token"
            token_ids = [state.last_token, *token_ids[1:]]
        assert row.samples or not row.num_drafts
        return token_ids

    def _read(self, state: "_FakeRow", num_tokens: int) -> list[tuple[int, int]]:
        """Return what the model sees of the first num_tokens of a request."""
        num_shared = 0 if state.leader is None else state.share[1]
        shared = [self._pool[self._slot(state.leader, position)] for position in range(num_shared)]
        return shared + [self._pool[self._slot(state, position)] for position in range(num_shared, num_tokens)]

    def _next_token(self, history: list[tuple[int, int]], count: int) -> int:
        return fake_token(history, count)

    def _pool_hidden(self, row: RowPlan, state: "_FakeRow") -> bytes:
        assert row.pool_span is not None
        end = row.pool_span.start + row.pool_span.num_tokens
        history = self._read(state, end)
        total = sum(fake_hidden(history[: p + 1]) for p in range(row.pool_span.start, end))
        return (total * np.nan if self._is_spoiled(history) else total).tobytes()

    def _prompt_logprob(self, state: "_FakeRow", position: int, token_id: int) -> TokenLogprobs:
        entry = fake_prompt_logprob(position, token_id)
        if self._is_spoiled(self._read(state, position)):
            entry.logprob = float("nan")
        return entry

    def _is_spoiled(self, history: list[tuple[int, int]]) -> bool:
        return self.spoils is not None and any(token_id % 1000 == self.spoils for _, token_id in history)

    def _sample(self, row: RowPlan, state: "_FakeRow", result: StepResult, allowed: list[int] | None) -> None:
        assert allowed is None or not row.num_drafts, "a mask is for one position"
        end = row.start + row.num_tokens
        for num_known in range(end - row.num_drafts, end + 1):
            history = self._read(state, num_known)
            state.last_token = self._next_token(history, self.vocab_size)
            if allowed is not None:
                state.last_token = allowed[self._next_token(history, len(allowed))]
            is_spoiled = self._is_spoiled(history)
            if is_spoiled:
                state.last_token = 0  # the next step may embed it
            if state.params.logprobs is not None:  # also where there is no token, as the sampler does
                result.logprobs[len(result.token_ids)] = TokenLogprobs(-1.0, [state.last_token], [-1.0])
            result.token_ids.append(NO_TOKEN if is_spoiled else state.last_token)
        if row.num_drafts:
            state.last_token = -2

    def _slot(self, state: "_FakeRow", position: int) -> int:
        block_id = state.block_table[position // self.block_size]
        assert block_id != 0, "block 0 belongs to padding rows"
        return block_id * self.block_size + position % self.block_size


def fake_prompt_logprob(position: int, token_id: int) -> TokenLogprobs:
    """Return the score of a prompt token."""
    return TokenLogprobs(-float(position), [token_id], [-float(position)], 1)


def fake_hidden(history: list[tuple[int, int]]) -> np.ndarray:
    """Return the hidden state of the last token of `history`, a list of fake_kv: small whole numbers."""
    return np.array([fake_token(history, 1000), len(history)], dtype=np.float32)


def expected_embedding(prompt: list[int], pooling: str, *, lora_index: int = 0) -> list[float]:
    """Return what any correct engine over FakeExecutor makes of a prompt: no batch, no blocks, no cache."""
    history = [fake_kv(position, token_id, lora_index) for position, token_id in enumerate(prompt)]
    hidden = [fake_hidden(history[: end + 1]) for end in range(len(prompt))]
    return (hidden[-1] if pooling == "last" else sum(hidden) / np.float32(len(prompt))).tolist()


def fake_kv(position: int, token_id: int, lora_index: int) -> tuple[int, int]:
    """Return the keys and values of a token: every adapter's are its own."""
    return position, token_id + 1000 * lora_index


def fake_token(history: list[tuple[int, int]], vocab_size: int) -> int:
    """Return the token that follows `history`, a list of fake_kv."""
    return zlib.crc32(repr(history).encode()) % vocab_size


class FakeProposer:
    """Proposes what FakeExecutor will sample. errs: but for every fourth token or so, and sometimes less than asked."""

    def __init__(self, *, errs: bool = True, vocab_size: int = 50) -> None:
        self._errs = errs
        self._vocab_size = vocab_size

    def propose(self, prompt_token_ids: list[int], output_token_ids: list[int], count: int) -> list[int]:
        """See Proposer.propose."""
        tokens = prompt_token_ids + output_token_ids
        num_known = len(tokens)
        for _ in range(count):
            luck = zlib.crc32(f"{prompt_token_ids} {num_known} {len(tokens)}".encode()) % 8
            if self._errs and luck == 0:
                break
            token_id = fake_token(list(enumerate(tokens)), self._vocab_size)
            tokens.append((token_id + (self._errs and luck < 3)) % self._vocab_size)
        return tokens[num_known:]


def expected_tokens(
    prompt: list[int], params: SamplingParams, *, max_num_tokens: int, vocab_size: int = 50, lora_index: int = 0
) -> list[int]:
    """Return what any correct engine over FakeExecutor generates: no batch, no blocks, no cache."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + params.max_tokens, max_num_tokens):
        history = [fake_kv(position, token_id, lora_index) for position, token_id in enumerate(tokens)]
        tokens.append(fake_token(history, vocab_size))
        if tokens[-1] in params.stop_token_ids and len(tokens) - len(prompt) >= params.min_tokens:
            break
    return tokens[len(prompt) :]


class _FakeRow:
    """A request's row of device state."""

    def __init__(self, params: SamplingParams, lora_index: int) -> None:
        self.params = params
        self.lora_index = lora_index
        self.block_table: list[int] = []
        self.last_token = -1
        self.share = [0, 0]  # number and tokens of its group
        self.leader: _FakeRow | None = None  # in this step


class _FakeStep:
    """A step in flight. Nothing is computed before wait()."""

    def __init__(self, executor: FakeExecutor, plan: StepPlan, encoded: bytes) -> None:
        self.plan = plan
        self.encoded = encoded
        self.result: StepResult | None = None
        self.is_sampled = False
        self.allowed: dict[int, list[int]] = {}  # by req_index, of constrained rows
        self._executor = executor
        self._num_asked = 0  # whether it is done: the third time it is

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See StepHandle.sample."""
        assert not self.is_sampled
        self.is_sampled = True
        if masks is not None:
            assert set(masks.req_indices) <= {row.req_index for row in self.plan.rows if row.samples}
            size = len(masks.words) // len(masks.req_indices)
            assert size == 4 * -(-self._executor.vocab_size // 32)
            for place, req_index in enumerate(masks.req_indices):
                bits = int.from_bytes(masks.words[place * size : (place + 1) * size], "little")
                self.allowed[req_index] = [token for token in range(size * 8) if bits >> token & 1]
                assert self.allowed[req_index], "a mask allows nothing"
                assert self.allowed[req_index][-1] < self._executor.vocab_size, "a mask allows what does not exist"

    def is_done(self) -> bool:
        """See StepHandle.is_done."""
        assert self.is_sampled, "asked of a step that was not sampled"
        self._num_asked += 1
        return self._num_asked % 3 == 0

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        assert self.is_sampled, "waited for a step that was not sampled"
        self._executor.run_until(self)
        assert self.result is not None
        return self.result
