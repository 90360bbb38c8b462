"""EngineClient: the only door from the HTTP side to the engine. Plain asyncio; never torch.

SocketEngineClient is the real one: one connection per HTTP worker, made again after the engine was restarted.
tests/support/fakes.py has one without processes. A request's life here: submit() registers a mailbox under its
request_id and
sends AddRequest; StepEvents fill the mailbox, merging tokens while the reader is behind; the last output, an error or
the reader's leaving removes it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from engine.interface.errors import EngineDead, Overloaded, ServiceError, ShuttingDown, error_from_code
from engine.interface.protocol import (
    AbortRequest,
    AddRequest,
    AskKv,
    EngineReady,
    FromEngine,
    KvSnapshot,
    QueueState,
    RequestFailed,
    StepEvents,
    TokenLogprobs,
)
from engine.interface.transport import encode_frame, read_messages

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.05
QUEUE_IS_FULL = "The queue is full; try again later."


class RequestOutput(msgspec.Struct):
    """The next tokens of one request, in order. Several when the reader is behind; none in an end without a token."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token if asked for
    prompt_logprobs: list[TokenLogprobs] = []  # the next of the prompt's, from its second token on
    embedding: bytes = b""  # float32s, if that was asked for; with the end
    arrival_s: float = 0.0  # time.monotonic() when the newest of them was read from the socket
    num_cached_tokens: int | None = None  # with the first tokens
    queue_s: float | None = None
    prefill_s: float | None = None
    finish_reason: str | None = None  # with the last: "stop" | "length" | "abort"
    stop_token_id: int | None = None


class EngineClient(Protocol):
    """Submit and abort requests.

    Every submitted request ends: by a RequestOutput with finish_reason or by a ServiceError.
    """

    @property
    def ready(self) -> EngineReady | None:
        """The engine's limits, or None while it is not serving (loading, restarting)."""
        ...

    @property
    def is_full(self) -> bool:
        """True while the engine's queue takes nothing more."""
        ...

    def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Iterate the outputs of a request, which is sent when iteration starts.

        Raises Overloaded, EngineDead, ShuttingDown, EngineError, RequestError. aclose() (or a cancel) before the end
        aborts it.
        """
        ...

    def abort(self, request_id: str, *, reason: str = "abort") -> None:
        """Ask the engine to end a request; its iterator then ends with that finish_reason ("abort" | "stop")."""
        ...

    async def kv_snapshot(self) -> KvSnapshot:
        """Ask the engine for its KV pool; who asks meanwhile gets the same. Raises EngineDead, ShuttingDown."""
        ...

    async def aclose(self) -> None:
        """Close the connection for good; open requests end with ShuttingDown, and so do later ones."""
        ...


class SocketEngineClient:
    """EngineClient over the engine's unix socket at `path`. start() once, inside the event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ready: EngineReady | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._mailboxes: dict[str, _Mailbox] = {}
        self._task: asyncio.Task[None] | None = None
        self._kv: asyncio.Future[KvSnapshot] | None = None  # asked for, not there yet
        self._is_full = False
        self._is_closed = False
        self._greeted = asyncio.Event()

    @property
    def ready(self) -> EngineReady | None:
        """The engine's limits, or None while it is not connected."""
        return self._ready

    @property
    def is_full(self) -> bool:
        """See EngineClient.is_full."""
        return self._is_full

    async def start(self) -> None:
        """Connect in the background, and again whenever the engine comes back."""
        self._task = asyncio.create_task(self._run(), name="engine-client")

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Wait for the engine's greeting, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._greeted.wait(), timeout_s)

    async def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """See EngineClient.submit."""
        if self._is_closed:
            raise _shutting_down()
        if self._writer is None or self._ready is None:
            raise EngineDead("The engine is not serving; try again shortly.")
        if self._is_full:
            raise Overloaded(QUEUE_IS_FULL)
        mailbox = self._mailboxes[request.request_id] = _Mailbox()
        self._writer.write(encode_frame(request))
        try:
            while True:
                output = await mailbox.get()
                if output.finish_reason is not None:
                    self._mailboxes.pop(request.request_id, None)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self._mailboxes.pop(request.request_id, None) is not None:
                self.abort(request.request_id)

    def abort(self, request_id: str, *, reason: str = "abort") -> None:
        """See EngineClient.abort."""
        if self._writer is not None:
            self._writer.write(encode_frame(AbortRequest(request_id, reason)))

    async def kv_snapshot(self) -> KvSnapshot:
        """See EngineClient.kv_snapshot."""
        if self._kv is None:
            if self._is_closed:
                raise _shutting_down()
            if self._writer is None or self._ready is None:
                raise EngineDead("The engine is not serving; try again shortly.")
            self._kv = asyncio.get_running_loop().create_future()
            self._writer.write(encode_frame(AskKv()))
        return await asyncio.shield(self._kv)

    async def aclose(self) -> None:
        """See EngineClient.aclose."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._disconnected(_shutting_down)

    async def _run(self) -> None:
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path, limit=1 << 20)
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            try:
                async for message in read_messages(reader, FromEngine):
                    self._dispatch(message, time.monotonic())
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("engine connection lost error=%r", str(error))
            except Exception:  # a bug here must not leave this worker without an engine for ever
                logger.exception("engine connection dropped")
            self._disconnected(_engine_dead)
            await asyncio.sleep(_RECONNECT_S)

    def _disconnected(self, make_error: Callable[[], ServiceError]) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._ready = None
        self._greeted.clear()
        self._is_full = False
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(make_error())
        kv, self._kv = self._kv, None
        if kv is not None:
            kv.set_exception(make_error())
            kv.exception()  # whoever asked may have left

    def _dispatch(self, message: FromEngine, now: float) -> None:
        if isinstance(message, StepEvents):
            self._dispatch_step(message, now)
        elif isinstance(message, RequestFailed):
            mailbox = self._mailboxes.pop(message.request_id, None)
            if mailbox is not None:
                mailbox.fail(error_from_code(message.code, message.message, message.param))
        elif isinstance(message, QueueState):
            self._is_full = message.is_full
        elif isinstance(message, KvSnapshot):
            kv, self._kv = self._kv, None
            if kv is not None:
                kv.set_result(message)
        else:
            self._ready = message
            self._greeted.set()

    def _dispatch_step(self, events: StepEvents, now: float) -> None:
        started = {entry.row: entry for entry in events.started}
        finished = {entry.row: entry for entry in events.finished}
        start = 0
        for row, request_id in enumerate(events.request_ids):
            end = start + events.num_tokens[row]
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:  # else its reader left while this step was in flight
                output = RequestOutput(events.token_ids[start:end], events.logprobs.get(row), arrival_s=now)
                if row in events.prompt_logprobs:
                    output.prompt_logprobs = events.prompt_logprobs[row]
                output.embedding = events.embeddings.get(row, b"")
                if row in started:
                    entry = started[row]
                    output.num_cached_tokens, output.queue_s, output.prefill_s = (
                        entry.num_cached_tokens,
                        entry.queue_s,
                        entry.prefill_s,
                    )
                if row in finished:
                    output.finish_reason, output.stop_token_id = finished[row].reason, finished[row].stop_token_id
                mailbox.put(output)
            start = end


def _engine_dead() -> EngineDead:
    return EngineDead("The engine stopped while it served this request; it is being restarted.")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down and cannot finish this request.")


class _Mailbox:
    """What one reader has not taken yet: at most one output, into which later ones are merged, or an error."""

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._error: ServiceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output."""
        if self._output is None:
            self._output = output
        else:
            _merge(self._output, output)
        self._wake()

    def fail(self, error: ServiceError) -> None:
        """End with an error, after what has already arrived."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """Wait for and take what has arrived."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(first: RequestOutput, second: RequestOutput) -> None:
    """Append `second` to `first` in place. Only the first output with a token has the start facts."""
    if not first.token_ids and second.queue_s is not None:  # only prompt log-probabilities came so far
        first.num_cached_tokens, first.queue_s, first.prefill_s = (
            second.num_cached_tokens,
            second.queue_s,
            second.prefill_s,
        )
    first.token_ids += second.token_ids
    first.prompt_logprobs += second.prompt_logprobs
    first.embedding += second.embedding
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    first.arrival_s = second.arrival_s
    first.finish_reason, first.stop_token_id = second.finish_reason, second.stop_token_id
