"""SocketEngineClient: an EngineClient with one connection per HTTP worker. Plain asyncio; never torch.

It reconnects after an engine restart. When the engine ends, open requests wait for the next one and are submitted to it
(engine/interface/replays.py).
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable

import msgspec

from engine.interface.client import QUEUE_IS_FULL
from engine.interface.errors import EngineDead, Overloaded, PoisonRequest, RateLimited, ServiceError, ShuttingDown
from engine.interface.kv_snapshot import KvSnapshot
from engine.interface.mailbox import Mailbox, Mailboxes, RequestOutput
from engine.interface.metrics import Metrics
from engine.interface.protocol import (
    AbortRequest,
    Accepted,
    AddRequest,
    Alone,
    AskKv,
    Begun,
    EngineReady,
    FromEngine,
    GrammarLimit,
    GrammarUse,
    QueueCosts,
    QueueState,
    RefuseDigest,
    RequestFailed,
    SetAside,
    StepEvents,
    TenantUse,
)
from engine.interface.replays import REFUSED_S
from engine.interface.tenant import Tenant
from engine.interface.transport import MessageProtocol, encode_frame

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.05
_WAIT_POLL_S = 0.2
_TOLD_POLL_S = 0.005
_LOAD_RETRY_S = 10  # where as many wait for an engine as it will take
_MAX_TOLD_S = 2.0  # for the launcher to tell how an engine ended, which it does before it starts the next


class SocketEngineClient:
    """EngineClient over the engine's unix socket at `path`. Call start() once, inside the event loop.

    max_replays: as in ServerConfig. num_ends, was_killed: return what the launcher last told of engines that have ended
    (State); without num_ends nothing is waited for. has_given_up: returns True once open requests shall no longer wait
    for the next engine. moved_to: returns the socket of the engine of a daemon that has taken this one over, or "".
    is_remote: the socket leads to an engine of another host, with a clock of its own; max_replays must be 0.
    """

    def __init__(
        self,
        path: str,
        *,
        max_replays: int = 0,
        num_ends: Callable[[], int] | None = None,
        was_killed: Callable[[], bool] = lambda: False,
        has_given_up: Callable[[], bool] = lambda: False,
        moved_to: Callable[[], str] = str,
        metrics: Metrics | None = None,
        is_remote: bool = False,
    ) -> None:
        self._path = path
        self._is_remote = is_remote
        self._ahead_s = 0.0  # by which the engine's clock is ahead
        self._moved_to = moved_to
        self._max_replays = max_replays
        self._num_ends = num_ends or itertools.count().__next__
        self._num_ends_seen = -1
        self._was_killed = was_killed
        self._has_given_up = has_given_up
        self._metrics = metrics or Metrics()
        self._lost_s: float | None = None  # when the engine ended for which open requests wait; None: none waits
        self._waiting: asyncio.Task[None] | None = None
        self._had_progress = False  # a request got a token or its embedding from the present engine
        self._refused: dict[bytes, float] = {}  # digests of poison, and until when
        self._costs: QueueCosts | None = None  # what engines have measured
        self._ready: EngineReady | None = None
        self._last_ready: EngineReady | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._mailboxes = Mailboxes()
        self._task: asyncio.Task[None] | None = None
        self._kv: asyncio.Future[KvSnapshot] | None = None  # the pending request for a snapshot
        self._is_full = False
        self._retry_after_s = 1  # while it is full
        self._grammar_limits: dict[str, GrammarLimit] = {}  # by name of the tenant
        self._is_closed = False
        self._greeted = asyncio.Event()

    @property
    def ready(self) -> EngineReady | None:
        """The engine's limits, or None while it is not connected."""
        return self._ready

    @property
    def last_ready(self) -> EngineReady | None:
        """See EngineClient.last_ready."""
        return self._last_ready

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

    def submit(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """See EngineClient.submit."""
        return self._mailboxes.outputs(request, send=self._send, abort=lambda: self.abort(request.request_id))

    def abort(self, request_id: str, *, reason: str = "abort") -> None:
        """See EngineClient.abort."""
        mailbox = self._mailboxes.by_id.get(request_id)
        if mailbox is not None:
            mailbox.end_reason = reason
            if self._lost_s is not None:
                self._end_waiting(request_id)
        if self._writer is not None:
            self._writer.write(encode_frame(AbortRequest(request_id, reason)))

    async def kv_snapshot(self) -> KvSnapshot:
        """See EngineClient.kv_snapshot."""
        if self._kv is None:
            writer = self._serving_writer()
            self._kv = asyncio.get_running_loop().create_future()
            writer.write(encode_frame(AskKv()))
        return await asyncio.shield(self._kv)

    def check_grammar(self, tenant: Tenant) -> None:
        """See EngineClient.check_grammar."""
        limit = self._grammar_limits.get(tenant.name) if tenant.grammar_seconds is not None else None
        rest_s = 0.0 if limit is None else limit.until_s - time.monotonic()
        if limit is not None and rest_s > 0:
            raise RateLimited(
                f"The API key {tenant.name} has used its grammar_seconds, {limit.limit_s:g} a minute.",
                retry_after_s=math.ceil(rest_s),
            )

    def is_decided(self, request_id: str) -> bool:
        """See EngineClient.is_decided."""
        return self._mailboxes.is_decided(request_id)

    def spend_grammar_s(self, tenant: Tenant, seconds: float) -> None:
        """See EngineClient.spend_grammar_s. Does nothing while the engine does not serve."""
        if self._writer is not None and self._ready is not None:
            self._writer.write(encode_frame(GrammarUse(tenant, seconds)))

    def tell_use(self, use: TenantUse) -> None:
        """See ToldOfUses.tell_use."""
        if self._writer is not None and self._ready is not None:
            self._writer.write(encode_frame(use))

    async def aclose(self) -> None:
        """See EngineClient.aclose."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._disconnected()
        self._fail_open(_shutting_down)

    @property
    def _can_wait(self) -> bool:
        """True while no engine serves, and one did when the request was checked: it may wait for the next one."""
        has_engine = self._ready is not None or self._last_ready is None
        return not (has_engine or self._is_closed or not self._max_replays or self._has_given_up())

    def _send(self, mailbox: Mailbox) -> None:
        writer = None if self._can_wait else self._serving_writer()
        if (self._is_full or self._is_crowded(writer)) and not mailbox.journal.goes_on:
            # an earlier engine had room for others
            raise Overloaded(QUEUE_IS_FULL, retry_after_s=_LOAD_RETRY_S if writer is None else self._retry_after_s)
        if writer is None:
            mailbox.journal.note_wait()
            self._suspend()
        else:
            writer.write(encode_frame(_by_its_clock(mailbox.journal.submit(), self._ahead_s)))

    def _is_crowded(self, writer: asyncio.WriteTransport | None) -> bool:
        """Return whether the newest request is too much for the next engine: the last one could not have had them all.

        It would have run and queued so many requests, and so many tokens of new ones; a single one may have any length.
        """
        last, by_id = self._last_ready, self._mailboxes.by_id
        if writer is not None or last is None:
            return False
        if len(by_id) > last.max_num_seqs + last.max_queued_requests:
            return True
        lengths = [mailbox.journal.num_tokens for mailbox in by_id.values() if not mailbox.journal.is_submitted]
        return len(lengths) > 1 and sum(lengths) > last.num_blocks * last.block_size + last.max_queued_tokens

    def _serving_writer(self) -> asyncio.WriteTransport:
        """Return the connection to an engine that serves. Raises ShuttingDown or EngineDead."""
        if self._is_closed:
            raise _shutting_down()
        if self._writer is None or self._ready is None:
            raise EngineDead("The engine is not serving; try again shortly.")
        return self._writer

    async def _run(self) -> None:
        while True:
            try:
                path = self._moved_to() or self._path
                _, connection = await asyncio.get_running_loop().create_unix_connection(
                    lambda: MessageProtocol(FromEngine, on_open=self._open, on_message=self._receive), path
                )
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            try:
                await connection.closed
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("engine connection lost error=%r", str(error))
            except Exception:  # after a bug here this worker must still reconnect
                logger.exception("engine connection dropped after an internal error")
            self._disconnected()
            self._suspend()
            await asyncio.sleep(_RECONNECT_S)

    def _open(self, writer: asyncio.WriteTransport) -> None:
        self._writer = writer

    def _receive(self, message: FromEngine) -> None:
        self._dispatch(message, time.monotonic())

    def _disconnected(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._ready = None
        self._greeted.clear()
        self._is_full = False
        kv, self._kv = self._kv, None
        if kv is not None:
            kv.set_exception(_shutting_down() if self._is_closed else _engine_dead())
            kv.exception()  # mark it as retrieved: the caller may have been cancelled

    def _fail_open(self, make_error: Callable[[], ServiceError]) -> None:
        self._lost_s = None
        if self._waiting is not None:
            self._waiting.cancel()
        self._mailboxes.fail_all(make_error)

    def _suspend(self) -> None:
        """Let the open requests wait for the next engine."""
        if not self._max_replays:
            self._fail_open(_engine_dead)
        if self._lost_s is not None or not self._mailboxes.by_id:
            return
        self._lost_s = time.monotonic()
        for request_id, mailbox in list(self._mailboxes.by_id.items()):
            if mailbox.end_reason is not None:
                self._end_waiting(request_id)
        logger.warning("the engine ended; open requests wait for the next one requests=%d", len(self._mailboxes.by_id))
        self._waiting = asyncio.create_task(self._watch_wait(), name="engine-wait")

    async def _watch_wait(self) -> None:
        while not self._has_given_up():
            await asyncio.sleep(_WAIT_POLL_S)
        logger.error("no engine to go on with open requests requests=%d", len(self._mailboxes.by_id))
        self._fail_open(_engine_dead)

    def _end_waiting(self, request_id: str) -> None:
        """End a waiting request that was to be aborted, as the engine would have."""
        mailbox = self._mailboxes.by_id.pop(request_id)
        mailbox.put(RequestOutput([], finish_reason=mailbox.end_reason))

    def _resume(self, writer: asyncio.WriteTransport, *, is_fault: bool) -> None:
        """Submit the waiting requests to the engine that is ready. is_fault: one of them may have ended the last."""
        now, lost_s, self._lost_s = time.monotonic(), self._lost_s, None
        if self._waiting is not None:
            self._waiting.cancel()
        num_tokens, by_id = 0, self._mailboxes.by_id
        for request_id, mailbox in list(by_id.items()):
            journal = mailbox.journal
            error = journal.end_engine(
                is_fault=is_fault, had_progress=self._had_progress, max_replays=self._max_replays
            )
            if error is None:
                continue
            del by_id[request_id]
            logger.error("request given up request_id=%s code=%s reason=%r", request_id, error.code, error.message)
            if isinstance(error, PoisonRequest):
                self._refused[journal.digest] = now + REFUSED_S
            mailbox.fail(error)
        self._had_progress = False
        self._refused = {digest: until_s for digest, until_s in self._refused.items() if until_s > now}
        for digest, until_s in self._refused.items():
            writer.write(encode_frame(RefuseDigest(digest, until_s)))
        if self._costs is not None:
            writer.write(encode_frame(self._costs))
        num_replays = 0
        messages = [mailbox.journal.submit() for mailbox in by_id.values()]
        for message in sorted(messages, key=lambda message: (not message.is_isolated, not message.is_suspect)):
            writer.write(encode_frame(message))
            num_replays += message.num_replays > 0
            num_tokens += message.num_prompt_tokens + len(message.output) // 4
        self._metrics.count("request_replays_total", num_replays)
        if lost_s is not None:
            logger.warning(
                "open requests go on requests=%d tokens=%d after_s=%.2f", len(by_id), num_tokens, now - lost_s
            )

    def _dispatch(self, message: FromEngine, now: float) -> None:
        if isinstance(message, StepEvents | RequestFailed | Accepted):
            self._had_progress |= isinstance(message, StepEvents) and bool(message.token_ids or message.embeddings)
            self._mailboxes.deliver(message, now)
        elif isinstance(message, Begun):
            self._mailboxes.begin(message)
        elif isinstance(message, Alone):
            self._mailboxes.isolate(message)
        elif isinstance(message, SetAside):
            self._mailboxes.set_aside(message)
        elif isinstance(message, QueueCosts):
            self._costs = message
        elif isinstance(message, QueueState):
            self._is_full, self._retry_after_s = message.is_full, message.retry_after_s
        elif isinstance(message, GrammarLimit):
            self._grammar_limits[message.name] = message
        elif isinstance(message, KvSnapshot):
            kv, self._kv = self._kv, None
            if kv is not None:
                message.now_s -= self._ahead_s
                kv.set_result(message)
        else:
            assert self._writer is not None
            self._take_greeting(message, self._writer, until_s=now + _MAX_TOLD_S)

    def _take_greeting(self, message: EngineReady, writer: asyncio.WriteTransport, *, until_s: float) -> None:
        """Begin to use the engine, as soon as the launcher has told of the earlier one's end.

        If it tells of none, the connection was lost and not the engine, which accuses no request.
        """
        if self._writer is not writer:
            return
        num_ends = self._num_ends()
        has_ended = num_ends > self._num_ends_seen
        if self._lost_s is not None and not has_ended and time.monotonic() < until_s:
            loop = asyncio.get_running_loop()
            loop.call_later(_TOLD_POLL_S, lambda: self._take_greeting(message, writer, until_s=until_s))
            return
        self._num_ends_seen = num_ends
        if self._is_remote:
            self._ahead_s = message.now_s - time.monotonic()
        self._ready = self._last_ready = message
        self._greeted.set()
        self._resume(writer, is_fault=has_ended and not self._was_killed())


def _by_its_clock(message: AddRequest, ahead_s: float) -> AddRequest:
    """Return a request with the times of an engine whose clock is ahead of this one."""
    if not ahead_s:
        return message
    deadline_s = None if message.deadline_s is None else message.deadline_s + ahead_s
    return msgspec.structs.replace(message, arrival_s=message.arrival_s + ahead_s, deadline_s=deadline_s)


def _engine_dead() -> EngineDead:
    return EngineDead("The engine stopped while it served this request; it is being restarted.")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The server is shutting down and cannot finish this request.")
