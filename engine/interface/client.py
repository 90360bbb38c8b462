"""EngineClient: the interface through which the server uses the engine. Plain asyncio; never torch.

SocketEngineClient implements it with one connection per HTTP worker, and reconnects after an engine restart.
tests/support/fakes.py has an implementation without processes.
Life of a request: submit() registers a mailbox under its request_id and sends AddRequest. StepEvents fill the mailbox;
outputs that the reader has not taken yet are merged. The last output, an error or the end of the iteration removes it.
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
    CacheReport,
    EngineReady,
    FromEngine,
    KvSnapshot,
    QueueState,
    RequestFailed,
    Started,
    StepEvents,
    TokenLogprobs,
)
from engine.interface.transport import encode_frame, read_messages

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.05
QUEUE_IS_FULL = "The queue is full; try again later."


class RequestOutput(msgspec.Struct):
    """The next tokens of one request, in order: several if the reader is slow, none if the request ends without one."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token, if requested
    prompt_logprobs: list[TokenLogprobs] = []  # the next ones of the prompt, which start at its second token
    embedding: bytes = b""  # float32s, if requested; in the last output
    arrival_s: float = 0.0  # time.monotonic() when the newest token was read from the socket
    num_cached_tokens: int | None = None  # in the output with the first tokens, as the next three
    queue_s: float | None = None
    prefill_s: float | None = None
    cache: CacheReport | None = None
    finish_reason: str | None = None  # in the last output: "stop" | "length" | "abort"
    stop_token_id: int | None = None


class EngineClient(Protocol):
    """Submits and aborts requests.

    Every submitted request ends, with a RequestOutput that has a finish_reason or with a ServiceError.
    """

    @property
    def ready(self) -> EngineReady | None:
        """The engine's limits, or None while the engine does not serve (loading, restarting)."""
        ...

    @property
    def is_full(self) -> bool:
        """True while the engine's queue is full."""
        ...

    @property
    def engines(self) -> dict[str, bool]:
        """The engines by name and whether each serves; {}: there is one engine, which has no name."""
        ...

    def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Iterate over the outputs of a request. The first iteration sends the request.

        Raises Overloaded, EngineDead, ShuttingDown, EngineError, RequestError. aclose() or a cancellation before the
        end aborts the request.
        """
        ...

    def abort(self, request_id: str, *, reason: str = "abort") -> None:
        """Tell the engine to end a request; its last output then has this finish_reason ("abort" | "stop")."""
        ...

    async def kv_snapshot(self) -> KvSnapshot:
        """Request a snapshot of the KV pool; concurrent calls share one. Raises EngineDead, ShuttingDown."""
        ...

    async def aclose(self) -> None:
        """Close the connection permanently. Open and later requests end with ShuttingDown."""
        ...


class SocketEngineClient:
    """EngineClient over the engine's unix socket at `path`. Call start() once, inside the event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ready: EngineReady | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._mailboxes: dict[str, _Mailbox] = {}
        self._task: asyncio.Task[None] | None = None
        self._kv: asyncio.Future[KvSnapshot] | None = None  # the pending request for a snapshot
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

    @property
    def engines(self) -> dict[str, bool]:
        """See EngineClient.engines."""
        return {}

    async def start(self) -> None:
        """Connect in the background, and reconnect after each engine restart."""
        self._task = asyncio.create_task(self._run(), name="engine-client")

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Wait up to timeout_s for the engine's greeting (EngineReady)."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._greeted.wait(), timeout_s)

    async def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """See EngineClient.submit."""
        writer = self._serving_writer()
        if self._is_full and not request.output:  # an earlier engine had room for the others
            raise Overloaded(QUEUE_IS_FULL)
        mailbox = self._mailboxes[request.request_id] = _Mailbox()
        writer.write(encode_frame(request))
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
            writer = self._serving_writer()
            self._kv = asyncio.get_running_loop().create_future()
            writer.write(encode_frame(AskKv()))
        return await asyncio.shield(self._kv)

    async def aclose(self) -> None:
        """See EngineClient.aclose."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._disconnected(_shutting_down)

    def _serving_writer(self) -> asyncio.StreamWriter:
        """Return the connection to an engine that serves. Raises ShuttingDown or EngineDead."""
        if self._is_closed:
            raise _shutting_down()
        if self._writer is None or self._ready is None:
            raise EngineDead("The engine is not serving; try again shortly.")
        return self._writer

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
            except Exception:  # after a bug here this worker must still reconnect
                logger.exception("engine connection dropped after an internal error")
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
            kv.exception()  # mark it as retrieved: the caller may have been cancelled

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
        # Most rows of most steps have tokens alone
        with_more = {*started, *finished, *events.logprobs, *events.prompt_logprobs, *events.embeddings}
        mailboxes, token_ids, start = self._mailboxes, events.token_ids, 0
        for row, (request_id, num_tokens) in enumerate(zip(events.request_ids, events.num_tokens, strict=True)):
            end = start + num_tokens
            mailbox = mailboxes.get(request_id)
            if mailbox is None:  # its reader closed while this step was in flight
                pass
            elif row not in with_more:
                mailbox.put(RequestOutput(token_ids[start:end], arrival_s=now))
            else:
                output = RequestOutput(token_ids[start:end], events.logprobs.get(row), arrival_s=now)
                output.prompt_logprobs = events.prompt_logprobs.get(row, [])
                output.embedding = events.embeddings.get(row, b"")
                if row in started:
                    _copy_start(started[row], output)
                if row in finished:
                    output.finish_reason, output.stop_token_id = finished[row].reason, finished[row].stop_token_id
                mailbox.put(output)
            start = end


def _engine_dead() -> EngineDead:
    return EngineDead("The engine stopped while it served this request; it is being restarted.")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down and cannot finish this request.")


class _Mailbox:
    """Holds the unread output of one request: at most one output, into which later ones are merged, or an error."""

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
        if self._waiter is not None:
            self._wake(self._waiter)

    def fail(self, error: ServiceError) -> None:
        """Set the error that get() raises once the unread output is taken."""
        self._error = error
        if self._waiter is not None:
            self._wake(self._waiter)

    async def get(self) -> RequestOutput:
        """Wait for an output and take it. Raises the error of fail()."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._output = self._output, None
        return output

    def _wake(self, waiter: asyncio.Future[None]) -> None:
        self._waiter = None
        if not waiter.done():  # the reader was cancelled
            waiter.set_result(None)


def _copy_start(source: Started | RequestOutput, output: RequestOutput) -> None:
    output.num_cached_tokens, output.queue_s = source.num_cached_tokens, source.queue_s
    output.prefill_s, output.cache = source.prefill_s, source.cache


def _merge(first: RequestOutput, second: RequestOutput) -> None:
    """Append `second` to `first` in place. Only the first output with a token has cached tokens and start times."""
    if not first.token_ids and second.queue_s is not None:  # `first` has only prompt log-probabilities
        _copy_start(second, first)
    first.token_ids += second.token_ids
    first.prompt_logprobs += second.prompt_logprobs
    first.embedding += second.embedding
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    first.arrival_s = second.arrival_s
    first.finish_reason, first.stop_token_id = second.finish_reason, second.stop_token_id
