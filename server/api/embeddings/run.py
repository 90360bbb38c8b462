"""EmbeddingRun: the embeddings of one HTTP request, and their JSON in OpenAI's form. Never torch.

    EmbeddingSpec ─ submit, a window at a time ─→ hidden states, pooled by the engine ─→ cut, length 1 ─→ answer

Each input is one engine request; a window limits how many run at once. An early end (an error, a deadline, a client
that disconnects) aborts every engine request that is still open. Imports msgspec, numpy, engine.interface and server.
"""

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import numpy as np

from engine.interface.client import EngineClient
from engine.interface.errors import EngineError, RequestAborted
from engine.interface.mailbox import RequestOutput
from engine.interface.metrics import Metrics
from engine.interface.protocol import AddRequest, PoolingKind, SamplingParams, pack_token_ids
from engine.interface.tenant import Charge, Rates, Tenant
from server.api.objects import PromptTokensDetails
from server.errors import DeadlineExceeded
from server.generation.spec import Stats

_NOTHING_SAMPLED = SamplingParams(max_tokens=1)


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request, checked against every limit."""

    inputs: list[list[int]]
    pooling: PoolingKind
    dimensions: int  # at most the model's
    max_inputs_at_once: int  # in the engine, so that its queue is not exceeded
    max_tokens_at_once: int  # of these inputs, but for one that is longer
    cache_salt: str = ""
    open_salt: str = ""  # cache_salt, if the client had given none
    lora_index: int = 0  # as in AddRequest
    priority: int = 0
    tenant: Tenant = Tenant()
    timeout_s: float | None = None  # from arrival
    arrival_s: float  # time.monotonic()

    @property
    def charge(self) -> Charge:
        """What the whole request asks of its tenant's limits."""
        num_tokens = sum(map(len, self.inputs))
        return Charge(num_tokens, num_tokens)


class _Window:
    """Limits the inputs in the engine to what an idle engine's queue accepts."""

    def __init__(self, *, max_inputs: int, max_tokens: int) -> None:
        self._max_inputs = max_inputs
        self._max_tokens = max_tokens
        self._num_inputs = self._num_tokens = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def place(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_place(num_tokens))
            self._num_inputs += 1
            self._num_tokens += num_tokens
        try:
            yield
        finally:
            async with self._changed:
                self._num_inputs -= 1
                self._num_tokens -= num_tokens
                self._changed.notify_all()

    def _has_place(self, num_tokens: int) -> bool:
        fits = self._num_inputs < self._max_inputs and self._num_tokens + num_tokens <= self._max_tokens
        return fits or not self._num_inputs


class EmbeddingRun:
    """Runs one spec once. `request_id` is unique; the engine's requests are numbered below it."""

    def __init__(self, spec: EmbeddingSpec, *, request_id: str, client: EngineClient, metrics: Metrics) -> None:
        self.spec = spec
        self.request_id = request_id
        self._client = client
        self._metrics = metrics
        self._ends: dict[int, RequestOutput] = {}  # by input
        self._open: dict[str, None] = {}  # ids that the engine has
        self._is_cancelled = False
        self._rates: Rates | None = None

    async def embed_all(self) -> None:
        """Embed every input. Raises ServiceErrors."""
        spec = self.spec
        deadline = None if spec.timeout_s is None else spec.arrival_s + spec.timeout_s - time.monotonic()
        window = _Window(max_inputs=spec.max_inputs_at_once, max_tokens=spec.max_tokens_at_once)
        tasks = [asyncio.create_task(self._embed(index, window)) for index in range(len(spec.inputs))]
        try:
            async with asyncio.timeout(deadline):
                await asyncio.gather(*tasks)
        except TimeoutError:
            raise DeadlineExceeded(spec.timeout_s or 0.0) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def vectors(self) -> list[np.ndarray]:
        """Return the inputs' embeddings in order, [dimensions] float32 of length 1. Raises EngineError."""
        return [self._vector(index) for index in range(len(self.spec.inputs))]

    def cancel(self) -> None:
        """Cancel the run: embed_all() raises RequestAborted, at once or when it starts."""
        self._is_cancelled = True
        for request_id in self._open:
            self._client.abort(request_id)

    def stats(self) -> Stats:
        """Return the tokens used so far."""
        first = min(self._ends.values(), key=lambda output: output.arrival_s, default=None)
        last_s = max((output.arrival_s for output in self._ends.values()), default=self.spec.arrival_s)
        return Stats(
            num_prompt_tokens=sum(map(len, self.spec.inputs)),
            num_cached_tokens=sum(output.num_cached_tokens or 0 for output in self._ends.values()),
            cache=self._ends[0].cache if 0 in self._ends else None,
            rates=self._rates,
            queue_s=None if first is None else first.queue_s,
            prefill_s=None if first is None else first.prefill_s,
            total_s=max(last_s - self.spec.arrival_s, 0.0),
            finish_reasons=["stop"] if len(self._ends) == len(self.spec.inputs) else [],
        )

    async def _embed(self, index: int, window: "_Window") -> None:
        spec = self.spec
        request_id = f"{self.request_id}-{index}"
        async with window.place(len(spec.inputs[index])):
            if self._is_cancelled:
                raise RequestAborted("The request was cancelled.")
            request = AddRequest(
                request_id,
                pack_token_ids(spec.inputs[index]),
                _NOTHING_SAMPLED,
                arrival_s=spec.arrival_s,
                cache_salt=spec.cache_salt,
                open_salt=spec.open_salt,
                priority=spec.priority,
                pooling=spec.pooling,
                lora_index=spec.lora_index,
                tenant=spec.tenant,
                charge=None if index else spec.charge,
                deadline_s=None if spec.timeout_s is None else spec.arrival_s + spec.timeout_s,
            )
            self._open[request_id] = None
            try:
                async with aclosing(self._client.submit(request)) as outputs:  # closing it early aborts
                    async for output in outputs:
                        self._feed(index, output)
            finally:
                self._open.pop(request_id, None)
        if index not in self._ends:
            raise EngineError("The engine ended the request without a reason.")

    def _feed(self, index: int, output: RequestOutput) -> None:
        self._rates = output.rates or self._rates
        if output.finish_reason == "abort":
            raise RequestAborted("The request was cancelled.")
        if output.finish_reason is not None:
            output.arrival_s = output.arrival_s or time.monotonic()
            self._ends[index] = output
            self._metrics.observe("e2e_request_latency_seconds", output.arrival_s - self.spec.arrival_s)

    def _vector(self, index: int) -> np.ndarray:
        vector = unit_vector(self._ends[index].embedding, dimensions=self.spec.dimensions)
        if vector is None:
            raise EngineError(f"The model's hidden states for input[{index}] are not finite numbers.")
        return vector


def unit_vector(raw: bytes, *, dimensions: int) -> np.ndarray | None:
    """Return the first `dimensions` of some float32s, divided by their length (0 stays 0). None: not all are finite.

    It is cut before it is normalised, as Matryoshka embeddings are (Kusupati et al. 2022, arXiv:2205.13147, §3).
    """
    vector = np.frombuffer(raw, dtype=np.float32)[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length):
        return None
    return (vector / max(length, 1e-12)).astype(np.float32)


def to_base64(vector: np.ndarray) -> str:
    """Return a vector as OpenAI's clients read it: little-endian float32s."""
    return b64encode(vector.astype("<f4").tobytes()).decode("ascii")


class EmbeddingUsage(msgspec.Struct):
    """OpenAI's usage object of embeddings, with the number of cached tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(msgspec.Struct, kw_only=True):
    """One input's embedding: numbers, or little-endian float32s in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The whole answer, in the order of the inputs."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def encode_answer(run: EmbeddingRun, *, model: str, is_base64: bool) -> bytes:
    """Return the JSON of a finished run. Numbers are float32s to their last digit. Raises EngineError."""
    stats = run.stats()
    written = [  # one by one, since no other thread runs while msgspec encodes
        msgspec.Raw(
            msgspec.json.encode(Embedding(index=index, embedding=to_base64(vector) if is_base64 else vector.tolist()))
        )
        for index, vector in enumerate(run.vectors())
    ]
    num_tokens = stats.num_prompt_tokens
    usage = EmbeddingUsage(num_tokens, num_tokens, PromptTokensDetails(stats.num_cached_tokens))
    answer = EmbeddingList(data=[], model=model, usage=usage)
    return msgspec.json.encode(msgspec.structs.asdict(answer) | {"data": written})
