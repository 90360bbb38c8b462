"""Test doubles for the seams. Real behaviour, no mocks: each implements its Protocol in full.

FakeEngineClient   engine.interface.client.EngineClient without processes: answers with scripted token ids
FakeLauncherChannel     engine.interface.control.LauncherChannel without a launcher
MemoryStore        engine.tiers.store.BlockStore in a dictionary

tests/support/fake_executor.py has those of the engine's device side.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import numpy as np

from engine.interface.control import Ledger, Stage, State
from engine.interface.errors import EngineDead, ServiceError, ShuttingDown
from engine.interface.kv_snapshot import KvSnapshot
from engine.interface.mailbox import RequestOutput
from engine.interface.protocol import AddRequest, CacheReport, EngineReady, TenantUse, TokenLogprobs
from engine.interface.tenant import Rates, Tenant
from engine.tiers.store import BlockStore

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
        cache: CacheReport | None = None,
        hold: asyncio.Event | None = None,
    ) -> None:
        self.script = script
        self._ready = ready
        self.last = ready  # before there was none
        self.tokens_per_delta = tokens_per_delta
        self.delay_s = delay_s
        self.fail = fail
        self.fail_after = fail_after
        self.num_cached_tokens = num_cached_tokens
        self.cache = cache
        self.hold = hold
        self.is_full = False
        self.has_decided = True  # see is_decided()
        self.rates: Rates | None = None  # of every request
        self.checked_tenants: list[Tenant] = []  # before a grammar was compiled
        self.spent_grammar_s: list[tuple[Tenant, float]] = []
        self.told_uses: list[TenantUse] = []
        self.engines: dict[str, bool] = {}
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

    @property
    def last_ready(self) -> EngineReady | None:
        return self._ready or self.last

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

    def is_decided(self, request_id: str) -> bool:
        return self.has_decided

    async def kv_snapshot(self) -> KvSnapshot:
        self.num_kv_asks += 1
        await asyncio.sleep(self.delay_s)
        if isinstance(self.kv, ServiceError):
            raise self.kv
        return self.kv

    def check_grammar(self, tenant: Tenant) -> None:
        self.checked_tenants.append(tenant)

    def spend_grammar_s(self, tenant: Tenant, seconds: float) -> None:
        self.spent_grammar_s.append((tenant, seconds))

    def tell_use(self, use: TenantUse) -> None:
        self.told_uses.append(use)

    async def aclose(self) -> None:
        self._ready = None
        self.fail, self.fail_after = ShuttingDown("The server is shutting down."), 0

    async def _answer(self, request: AddRequest) -> AsyncIterator[RequestOutput]:
        if self.rates is not None:
            yield RequestOutput([], arrival_s=time.monotonic(), rates=self.rates)
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
                prompt_logprobs=scores_of_prompt(request) if i == 0 else [],
                logprobs=_logprobs(piece, request.params.logprobs),
                arrival_s=time.monotonic(),
                num_cached_tokens=self.num_cached_tokens if i == 0 else None,
                queue_s=0.001 if i == 0 else None,
                prefill_s=0.002 if i == 0 else None,
                cache=self.cache if i == 0 else None,
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
        self.key_tenants: dict[str, Tenant] = {}
        self.ledger = Ledger(0, 1_790_000_000.0, [])
        self.elsewhere: list[str] = []  # ids of requests that other workers serve

    async def scrape(self, *, is_open_metrics: bool = False) -> bytes:
        return self.page + b"# EOF\n" if is_open_metrics else self.page

    async def usage(self) -> Ledger:
        return self.ledger

    async def cancel(self, request_id: str, *, key_hash: str) -> bool:
        return request_id in self.elsewhere


class MemoryStore(BlockStore):
    """Keeps the newest blocks, `capacity` bytes of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: dict[tuple[int, bytes], bytes] = {}

    def has(self, group: int, key: bytes) -> bool:
        return (group, key) in self._blocks

    def put(self, group: int, key: bytes, data: bytes | memoryview) -> bool:
        self._blocks[group, key] = bytes(data)
        while sum(map(len, self._blocks.values())) > self._capacity:
            del self._blocks[next(iter(self._blocks))]
        return self.has(group, key)

    def get(self, group: int, key: bytes, out: memoryview) -> bool:
        data = self._blocks.get((group, key))
        if data is None or len(data) != len(out):
            return False
        out[:] = data
        return True

    def remove(self, names: Sequence[tuple[int, bytes]]) -> None:
        for name in names:
            self._blocks.pop(name, None)

    def close(self) -> None:
        self._blocks.clear()


def _logprobs(token_ids: list[int], num_top: int | None) -> list[TokenLogprobs] | None:
    """Token id t has log-probability -t/1000; the alternatives are the next ids."""
    if num_top is None:
        return None
    return [
        TokenLogprobs(-id_ / 1000, [id_ + k for k in range(num_top)], [-(id_ + k) / 1000 for k in range(num_top)])
        for id_ in token_ids
    ]


def scores_of_prompt(request: AddRequest) -> list[TokenLogprobs]:
    """As _logprobs, and a token's rank is the last digit of its id."""
    entries = _logprobs(request.prompt_token_ids[1:], request.params.prompt_logprobs) or []
    for token_id, entry in zip(request.prompt_token_ids[1:], entries, strict=False):
        entry.rank = token_id % 10
    return entries
