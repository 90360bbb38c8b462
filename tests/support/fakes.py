"""Test doubles for the seams. Real behaviour, no mocks: each implements its Protocol in full.

FakeEngineClient   engine.interface.client.EngineClient without processes: answers with scripted token ids
FakeLauncherChannel     engine.interface.control.LauncherChannel without a launcher
FakeExecutor       engine.core.step.Executor by arithmetic; expected_tokens() says what it must lead to
FakeProposer       engine.core.speculative.Proposer that knows that arithmetic, and errs now and then
"""

import asyncio
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import msgspec
import numpy as np

from engine.core.step import NEWEST, NO_TOKEN, RowPlan, StepPlan, StepResult, TokenMasks
from engine.interface.client import RequestOutput
from engine.interface.control import Stage, State
from engine.interface.errors import EngineDead, ServiceError, ShuttingDown
from engine.interface.protocol import AddRequest, EngineReady, KvSnapshot, SamplingParams, TokenLogprobs

READY = EngineReady(
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    num_blocks=64,
    block_size=16,
    vocab_size=512,
    max_queued_requests=2048,
    hidden_size=8,
    max_queued_tokens=64 * 256,
)


class FakeEngineClient:
    """Answers every request with `script` (token ids, or a function of the request), `tokens_per_delta` at a time.

    A request ends at one of its stop_token_ids, at max_tokens, or ("stop", without a token) at the script's end.
    `fail` is raised instead of the delta after `fail_after` tokens. `hold`, if set, is awaited before each delta.
    """

    def __init__(
        self,
        script: Sequence[int] | Callable[[AddRequest], Sequence[int]] = (),
        *,
        ready: EngineReady | None = READY,
        tokens_per_delta: int = 1,
        delay_s: float = 0.0,
        fail: ServiceError | None = None,
        fail_after: int = 0,
        num_cached_tokens: int = 0,
        hold: asyncio.Event | None = None,
    ) -> None:
        self.script = script
        self._ready = ready
        self.tokens_per_delta = tokens_per_delta
        self.delay_s = delay_s
        self.fail = fail
        self.fail_after = fail_after
        self.num_cached_tokens = num_cached_tokens
        self.hold = hold
        self.is_full = False
        self.kv: KvSnapshot | ServiceError = EngineDead("no snapshot was given")
        self.num_kv_asks = 0
        self.submitted: list[AddRequest] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self._aborting: set[str] = set()

    @property
    def ready(self) -> EngineReady | None:
        return self._ready

    @ready.setter
    def ready(self, ready: EngineReady | None) -> None:
        self._ready = ready

    async def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        self.submitted.append(request)
        has_failed = False
        try:
            async for delta in self._answer(request):
                if delta.finish_reason is not None:
                    self.finished.append(request.request_id)
                yield delta
        except ServiceError:
            has_failed = True
            raise
        finally:
            if request.request_id not in self.finished and not has_failed:
                self.abort(request.request_id)

    def abort(self, request_id: str, *, reason: str = "abort") -> None:
        if request_id not in self.aborted and request_id not in self.finished:
            self.aborted.append(request_id)
        self._aborting.add(request_id)

    async def kv_snapshot(self) -> KvSnapshot:
        self.num_kv_asks += 1
        await asyncio.sleep(self.delay_s)
        if isinstance(self.kv, ServiceError):
            raise self.kv
        return self.kv

    async def aclose(self) -> None:
        self._ready = None
        self.fail, self.fail_after = ShuttingDown("The server is shutting down."), 0

    async def _answer(self, request: AddRequest) -> AsyncIterator[RequestOutput]:
        if request.pooling is not None:
            yield await self._embed(request)
            return
        script = list(self.script(request) if callable(self.script) else self.script)
        ids, reason, stop_id = self._cut(script, request)
        pieces = [ids[i : i + self.tokens_per_delta] for i in range(0, len(ids), self.tokens_per_delta)] or [[]]
        num_sent = 0
        for i, piece in enumerate(pieces):
            await asyncio.sleep(self.delay_s)
            if self.hold is not None:
                await self.hold.wait()
            if self.fail is not None and num_sent >= self.fail_after:
                raise self.fail
            if request.request_id in self._aborting:
                yield RequestOutput([], finish_reason="abort")
                return
            is_last = i == len(pieces) - 1
            yield RequestOutput(
                piece,
                prompt_logprobs=_prompt_logprobs(request) if i == 0 else [],
                logprobs=_logprobs(piece, request.params.logprobs),
                arrival_s=time.monotonic(),
                num_cached_tokens=self.num_cached_tokens if i == 0 else None,
                queue_s=0.001 if i == 0 else None,
                prefill_s=0.002 if i == 0 else None,
                finish_reason=reason if is_last else None,
                stop_token_id=stop_id if is_last else None,
            )
            num_sent += len(piece)

    async def _embed(self, request: AddRequest) -> RequestOutput:
        await asyncio.sleep(self.delay_s)
        if self.hold is not None:
            await self.hold.wait()
        if self.fail is not None:
            raise self.fail
        if request.request_id in self._aborting:
            return RequestOutput([], finish_reason="abort")
        return RequestOutput(
            [],
            embedding=fake_embedding(request).tobytes(),
            arrival_s=time.monotonic(),
            num_cached_tokens=self.num_cached_tokens,
            queue_s=0.001,
            prefill_s=0.002,
            finish_reason="stop",
        )

    @staticmethod
    def _cut(script: list[int], request: AddRequest) -> tuple[list[int], str, int | None]:
        ids: list[int] = []
        for token_id in script:
            ids.append(token_id)
            if token_id in request.params.stop_token_ids and len(ids) > request.params.min_tokens:
                return ids, "stop", token_id
            if len(ids) == request.params.max_tokens:
                return ids, "length", None
        return ids, "stop", None


def fake_embedding(request: AddRequest) -> np.ndarray:
    """Return a vector that depends on the prompt and the kind of pooling, not normalised."""
    ids = request.prompt_token_ids
    head = [len(ids), ids[0], ids[-1], sum(ids), 1 if request.pooling == "last" else 2]
    return np.array([*head, *range(READY.hidden_size - len(head))], dtype=np.float32)


class FakeLauncherChannel:
    """A launcher that says what the test wants."""

    def __init__(self, stage: str = "ready", *, is_draining: bool = False, page: bytes = b"quire_up 1\n") -> None:
        self.state = State(Stage(stage), is_draining)
        self.page = page
        self.key_hashes: list[str] = []
        self.key_roles: dict[str, list[str]] = {}
        self.elsewhere: list[str] = []  # ids of requests that other workers serve

    async def scrape(self) -> bytes:
        return self.page

    async def cancel(self, request_id: str, *, key_hash: str) -> bool:
        return request_id in self.elsewhere


def _logprobs(token_ids: list[int], num_top: int | None) -> list[TokenLogprobs] | None:
    """Token id t has log-probability -t/1000; the alternatives are the next ids."""
    if num_top is None:
        return None
    return [
        TokenLogprobs(-id_ / 1000, [id_ + k for k in range(num_top)], [-(id_ + k) / 1000 for k in range(num_top)])
        for id_ in token_ids
    ]


def _prompt_logprobs(request: AddRequest) -> list[TokenLogprobs]:
    """As _logprobs, and a token's rank is the last digit of its id."""
    entries = _logprobs(request.prompt_token_ids[1:], request.params.prompt_logprobs) or []
    for token_id, entry in zip(request.prompt_token_ids[1:], entries, strict=False):
        entry.rank = token_id % 10
    return entries


class FakeExecutor:
    """Executor by arithmetic: each token is a hash of all tokens before it, read back through the block table.

    It keeps what a device keeps (last token and table by req_index, the pool by slot), and a step runs only when it is
    waited for, in launch order, as on a stream. So a block freed too early, a shared one overwritten, a wrong slot or
    a plan changed after its launch changes tokens, which then differ from expected_tokens(). Of a constrained row the
    hash chooses among the tokens that its mask allows. A row with drafts samples behind each of them, and spoils the
    request's last token, which the host must send next time. After the token `spoils` nothing is finite.
    """

    spoils: int | None = None

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.plans: list[bytes] = []  # JSON, in launch order
        self._pool: list[tuple[int, int]] = [(-1, -1)] * (num_blocks * block_size)  # fake_kv by slot
        self._rows: dict[int, _FakeRow] = {}  # by req_index
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
            launched.result = self._execute(launched.plan, launched.allowed)

    def _execute(self, plan: StepPlan, allowed: dict[int, list[int]]) -> StepResult:
        for req_index in plan.freed:
            self._rows.pop(req_index, None)  # named again if the plan before was given up
        for block_id in plan.cleaned:
            self._pool[block_id * self.block_size :][: self.block_size] = [(-1, -1)] * self.block_size
        for init in plan.inits:
            assert init.req_index not in self._rows, "a req_index is initialised while in use"
            self._rows[init.req_index] = _FakeRow(init.params, init.lora_index)
        assert len({row.req_index for row in plan.rows}) == len(plan.rows), "two rows of one request"
        has_chunk = [bool(row.token_ids) for row in plan.rows]
        assert has_chunk == sorted(has_chunk), "decode rows come first"
        for row in plan.rows:
            self._write(row, self._rows[row.req_index])
        result = StepResult(plan.step_id, [])
        for place, row in enumerate(plan.rows):
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

    def _write(self, row: RowPlan, state: "_FakeRow") -> None:
        state.block_table += row.new_block_ids
        token_ids = row.token_ids or [NEWEST]
        assert len(token_ids) == row.num_tokens
        assert NEWEST not in token_ids[1:]
        if token_ids[0] == NEWEST:
            assert state.last_token >= 0, "the device does not know the last token"
            token_ids = [state.last_token, *token_ids[1:]]
        assert row.samples or not row.num_drafts
        for position, token_id in enumerate(token_ids, row.start):
            self._pool[self._slot(state, position)] = fake_kv(position, token_id, state.lora_index)

    def _pool_hidden(self, row: RowPlan, state: "_FakeRow") -> bytes:
        assert row.pool_span is not None
        end = row.pool_span.start + row.pool_span.num_tokens
        history = [self._pool[self._slot(state, position)] for position in range(end)]
        total = sum(fake_hidden(history[: p + 1]) for p in range(row.pool_span.start, end))
        return (total * np.nan if self._is_spoiled(history) else total).tobytes()

    def _prompt_logprob(self, state: "_FakeRow", position: int, token_id: int) -> TokenLogprobs:
        entry = fake_prompt_logprob(position, token_id)
        if self._is_spoiled([self._pool[self._slot(state, earlier)] for earlier in range(position)]):
            entry.logprob = float("nan")
        return entry

    def _is_spoiled(self, history: list[tuple[int, int]]) -> bool:
        return any(token_id % 1000 == self.spoils for _, token_id in history)

    def _sample(self, row: RowPlan, state: "_FakeRow", result: StepResult, allowed: list[int] | None) -> None:
        assert allowed is None or not row.num_drafts, "a mask is for one position"
        end = row.start + row.num_tokens
        for num_known in range(end - row.num_drafts, end + 1):
            history = [self._pool[self._slot(state, position)] for position in range(num_known)]
            state.last_token = fake_token(history, self.vocab_size)
            if allowed is not None:
                state.last_token = allowed[fake_token(history, len(allowed))]
            if self._is_spoiled(history):
                result.token_ids.append(NO_TOKEN)
                state.last_token = 0  # the next step may embed it
                continue
            if state.params.logprobs is not None:
                result.logprobs[len(result.token_ids)] = TokenLogprobs(-1.0, [state.last_token], [-1.0])
            result.token_ids.append(state.last_token)
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


class _FakeStep:
    """A step in flight. Nothing is computed before wait()."""

    def __init__(self, executor: FakeExecutor, plan: StepPlan, encoded: bytes) -> None:
        self.plan = plan
        self.encoded = encoded
        self.result: StepResult | None = None
        self.is_sampled = False
        self.allowed: dict[int, list[int]] = {}  # by req_index, of constrained rows
        self._executor = executor

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

    def wait(self) -> StepResult:
        """See StepHandle.wait."""
        assert self.is_sampled, "waited for a step that was not sampled"
        self._executor.run_until(self)
        assert self.result is not None
        return self.result
