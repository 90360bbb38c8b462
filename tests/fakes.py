"""Test doubles for the seams. Real behaviour, no mocks: each implements its Protocol in full.

FakeEngineClient   engine.client.EngineClient without processes: answers with scripted token ids
FakeSupervisor     engine.control.Supervisor without a launcher
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from engine.client import Delta
from engine.control import Stage, State
from engine.errors import ServiceError
from engine.protocol import AddRequest, EngineReady, TokenLogprobs

READY = EngineReady(
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    num_blocks=64,
    block_size=16,
    vocab_size=512,
    max_waiting=32,
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

    def submit(self, request: AddRequest) -> AsyncIterator[Delta]:
        self.submitted.append(request)
        return self._deltas(request)

    def abort(self, request_id: str) -> None:
        if request_id not in self.aborted and request_id not in self.finished:
            self.aborted.append(request_id)
        self._aborting.add(request_id)

    async def aclose(self) -> None:
        self.fail, self.fail_after = self.fail, 0

    async def _deltas(self, request: AddRequest) -> AsyncIterator[Delta]:
        try:
            async for delta in self._answer(request):
                if delta.finish_reason is not None:
                    self.finished.append(request.request_id)
                yield delta
        finally:
            if request.request_id not in self.finished and self.fail is None:
                self.abort(request.request_id)

    async def _answer(self, request: AddRequest) -> AsyncIterator[Delta]:
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
                yield Delta([], finish_reason="abort")
                return
            is_last = i == len(pieces) - 1
            yield Delta(
                piece,
                logprobs=_logprobs(piece, request.params.logprobs),
                arrival_s=time.monotonic(),
                num_cached_tokens=self.num_cached_tokens if i == 0 else None,
                queue_s=0.001 if i == 0 else None,
                prefill_s=0.002 if i == 0 else None,
                finish_reason=reason if is_last else None,
                stop_token_id=stop_id if is_last else None,
            )
            num_sent += len(piece)

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


class FakeSupervisor:
    """A launcher that says what the test wants."""

    def __init__(self, stage: str = "ready", *, is_draining: bool = False, page: bytes = b"quire_up 1\n") -> None:
        self.state = State(Stage(stage), is_draining)
        self.page = page

    async def scrape(self) -> bytes:
        return self.page


def _logprobs(token_ids: list[int], num_top: int | None) -> list[TokenLogprobs] | None:
    """Token id t has log-probability -t/1000; the alternatives are the next ids."""
    if num_top is None:
        return None
    return [
        TokenLogprobs(-id_ / 1000, [id_ + k for k in range(num_top)], [-(id_ + k) / 1000 for k in range(num_top)])
        for id_ in token_ids
    ]
