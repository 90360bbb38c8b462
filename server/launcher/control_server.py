"""ControlServer: the launcher's end of the control channel (engine/interface/control.py). Never torch.

One connection per child. The server sends State to the workers, merges every MetricsDelta into the MetricsRegistry
and answers Scrape; it passes other messages to the launcher's `on_message`. A child that breaks the protocol loses
its connection and therefore ends. fetch_engine_limits() reads the first message that the engine sends on a new
connection. Imports engine.interface and server.launcher.metrics_registry.

KeyReloader: reads the key file again on SIGHUP and sends the keys to every HTTP worker.

Signals are handled one after another. If the file is wrong, the keys stay as they are and the log has the reason.
Imports engine.interface.config and server.config.api_keys.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.interface.config import LaunchConfig
from engine.interface.control import (
    Activate,
    AskUsage,
    Cancel,
    Cancelled,
    Drain,
    Flush,
    Flushed,
    FromLauncher,
    HandedOver,
    Hello,
    Keys,
    Leave,
    Page,
    ReloadTls,
    Scrape,
    Stage,
    State,
    ToLauncher,
)
from engine.interface.errors import StartupError
from engine.interface.metrics import MetricsDelta
from engine.interface.protocol import EngineReady, FromEngine
from engine.interface.tenant import Tenant
from engine.interface.transport import encode_frame, read_messages
from server.config.api_keys import file_notices, merge_roles, read_file_keys
from server.config.serve_flags import Tls, check_tls
from server.launcher.metrics_registry import MetricsRegistry
from server.launcher.processes import Tasks

logger = logging.getLogger(__name__)
# Children that are busy or hung delay a scrape by no more, once as workers and once as engine; their counts then come
# next time. Twice this is less than what a worker waits for the page.
_FLUSH_TIMEOUT_S = 1.0
_CANCEL_TIMEOUT_S = 1.0  # less than what a worker waits for the answer


class _Child:
    """One connection. `flushes` and `cancels` are the numbers of Flush and Cancel it has not answered yet."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.hello: Hello | None = None
        self.flushes: dict[int, asyncio.Event] = {}
        self.cancels: dict[int, asyncio.Future[bool | None]] = {}

    def send(self, message: FromLauncher) -> None:
        if not self.writer.is_closing():
            self.writer.write(encode_frame(message))


class ControlServer:
    """Talks to all children. Life: start → broadcasts and scrapes → aclose, which ends the children."""

    def __init__(self, *, registry: MetricsRegistry, on_message: Callable[[Hello, Any], None]) -> None:
        self._registry = registry
        self._on_message = on_message
        self._children: list[_Child] = []
        self._numbers = itertools.count(1)
        self._state = State(Stage("imports"), False)
        self._keys: Keys | None = None  # None: those in the workers' configuration
        self._server: asyncio.Server | None = None
        self._tasks = Tasks()

    async def start(self, path: str) -> None:
        """Listen on a unix socket at `path`."""
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def aclose(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for child in self._children:
            child.writer.close()

    @property
    def state(self) -> State:
        """The last State that was sent to the workers."""
        return self._state

    def set_state(
        self,
        *,
        stage: Stage | None = None,
        is_draining: bool | None = None,
        fault: str | None = None,
        accepts: bool | None = None,
        lets_wait: bool | None = None,
    ) -> None:
        """Change the state and send it to every worker."""
        self._state = msgspec.structs.replace(
            self._state,
            stage=self._state.stage if stage is None else stage,
            is_draining=self._state.is_draining if is_draining is None else is_draining,
            fault=self._state.fault if fault is None else fault,
            accepts=self._state.accepts if accepts is None else accepts,
            lets_wait=self._state.lets_wait if lets_wait is None else lets_wait,
        )
        self.send(self._state, role="worker")

    def end_engine(self, *, fault: str, was_killed: bool, lets_wait: bool = False) -> None:
        """Tell every worker that an engine that was ready has ended. lets_wait: see State."""
        self._state = msgspec.structs.replace(self._state, num_ends=self._state.num_ends + 1, was_killed=was_killed)
        self.set_state(stage=Stage("restarting"), fault=fault, lets_wait=lets_wait)

    def follow(self, other: State, *, num_ends: int) -> None:
        """Tell every worker the state of the daemon that has the engine. num_ends: of the engines before."""
        self._state = msgspec.structs.replace(
            self._state,
            num_ends=num_ends + other.num_ends,
            was_killed=other.was_killed or not other.num_ends,  # the last engine was ended for the takeover
            engine_socket=other.engine_socket,
        )
        self.set_state(stage=other.stage, fault=other.fault)

    def set_keys(
        self,
        hashes: list[str],
        roles: dict[str, list[str]] | None = None,
        tenants: dict[str, Tenant] | None = None,
    ) -> None:
        """Change the API keys and send them to every worker, also to later ones. roles, tenants: as in Keys."""
        self._keys = Keys(hashes, roles or {}, tenants or {})
        self.send(self._keys, role="worker")

    async def hand_over(self) -> None:
        """Tell every worker that another daemon has the port; return when all accept no more, or after a second."""
        self.send(HandedOver(), role="worker")
        await self._flush([child for child in self._children if self._can_flush(child, "worker")])

    def send(
        self,
        message: State | Drain | Keys | ReloadTls | HandedOver | Activate | Leave,
        *,
        role: str,
        index: int | None = None,
    ) -> None:
        """Send to every connected child of a role, or to the one with `index`."""
        for child in self._children:
            hello = child.hello
            if hello is not None and hello.role == role and index in (None, hello.index):
                child.send(message)

    async def settle(self, role: str, index: int) -> None:
        """Wait a moment until everything that an ended child had sent is read."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.sleep(0.02)
                while any(
                    child.hello is None or (child.hello.role, child.hello.index) == (role, index)
                    for child in self._children
                ):
                    await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        child = _Child(writer)
        self._children.append(child)
        try:
            async for message in read_messages(reader, ToLauncher):
                self._receive(child, message)
        except (OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
            logger.error("control connection lost child=%s error=%r", child.hello, str(error))
        finally:
            self._children.remove(child)
            if child.hello is not None:
                self._registry.forget(_source(child.hello))
            for flushed in child.flushes.values():
                flushed.set()
            for answer in child.cancels.values():
                if not answer.done():
                    answer.set_result(False)  # what it served has ended with it
            writer.close()

    def _receive(self, child: _Child, message: Any) -> None:
        match message:
            case Hello():
                child.hello = message
                if message.role == "worker":
                    if self._keys is not None:
                        child.send(self._keys)  # before the state, for which it waits
                    child.send(self._state)
                self._on_message(message, message)
            case MetricsDelta() if child.hello is not None:
                self._registry.merge(message, source=_source(child.hello))
            case Flushed(number):
                if number in child.flushes:
                    child.flushes.pop(number).set()
            case Scrape():
                self._tasks.spawn(self._answer_scrape(child, message))
            case AskUsage(number):
                self._tasks.spawn(self._answer_usage(child, number))
            case Cancel():
                self._tasks.spawn(self._answer_cancel(child, message))
            case Cancelled(number, found):
                if number in child.cancels and not child.cancels[number].done():
                    child.cancels[number].set_result(found)
            case _ if child.hello is not None:
                self._on_message(child.hello, message)
            case _:
                raise ValueError(f"{type(message).__name__} before Hello")

    async def _answer_cancel(self, asker: _Child, asked: Cancel) -> None:
        """Forward a Cancel to every other worker; reply to the sender whether one of them had the request."""
        number = next(self._numbers)
        others = [child for child in self._children if child is not asker and self._can_flush(child, "worker")]
        answers = []
        for child in others:
            child.cancels[number] = asyncio.get_running_loop().create_future()
            answers.append(child.cancels[number])
            child.send(Cancel(number, asked.request_id, asked.key_hash))
        if answers:
            await asyncio.wait(answers, timeout=_CANCEL_TIMEOUT_S)
        for child in others:
            child.cancels.pop(number, None)
        found = [answer.result() for answer in answers if answer.done()]
        is_unknown = len(found) < len(answers) and not any(found)
        asker.send(Cancelled(asked.number, None if is_unknown else any(found)))

    async def _answer_scrape(self, scraper: _Child, asked: Scrape) -> None:
        """Collect every other child's counts, then send the page. The scraper has sent its own just before."""
        await self._collect(scraper)
        scraper.send(Page(asked.number, self._registry.render(is_open_metrics=asked.is_open_metrics)))

    async def _answer_usage(self, asker: _Child, number: int) -> None:
        """Collect every other child's counts, then send the ledger."""
        await self._collect(asker)
        asker.send(self._registry.ledger(number))

    async def _collect(self, asker: _Child) -> None:
        """Merge every other child's counts.

        Workers first: once they have answered, what they told the engine before is in its socket, and the engine
        counts that before it answers.
        """
        for role in ("worker", "engine"):
            await self._flush(
                [child for child in self._children if child is not asker and self._can_flush(child, role)]
            )

    async def _flush(self, children: list[_Child]) -> None:
        """Request counts from children and wait until they are merged, or until the timeout."""
        flush = Flush(next(self._numbers))
        events: list[asyncio.Event] = []
        for child in children:
            events.append(child.flushes.setdefault(flush.number, asyncio.Event()))
            child.send(flush)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                for event in events:
                    await event.wait()
        for child in children:
            child.flushes.pop(flush.number, None)

    def _can_flush(self, child: _Child, role: str) -> bool:
        """Return True if a child has the role and can answer now. A loading engine has no counts and cannot answer.

        A stalled engine does not answer either, and must not slow down the scrapes that report it.
        """
        has_role = child.hello is not None and child.hello.role == role
        return has_role and (role == "worker" or (self._state.stage.name == "ready" and not self._state.fault))


async def fetch_engine_limits(engine_socket: str) -> EngineReady | None:
    """Connect, read the engine's limits and disconnect; None if the engine has ended."""
    try:
        reader, writer = await asyncio.open_unix_connection(engine_socket)
    except OSError:
        return None
    try:
        async for message in read_messages(reader, FromEngine):
            return message if isinstance(message, EngineReady) else None
    except OSError:  # it ended before its greeting was read
        pass
    finally:
        writer.close()
    return None


async def learn_limits(registry: MetricsRegistry, engine_socket: str) -> None:
    """Let the metrics tell how the engine's pool is cut. If it has died again, the next one will say."""
    ready = await fetch_engine_limits(engine_socket)
    if ready is not None:
        registry.set_cache_config(block_size=ready.block_size, num_blocks=ready.num_blocks)


def _source(hello: Hello) -> str:
    return f"{hello.role}-{hello.index}"


class KeyReloader:
    """Holds the hashes of the current keys. set_keys: sends them, their roles and tenants to the workers."""

    def __init__(
        self,
        config: LaunchConfig,
        hashes: Sequence[str],
        set_keys: Callable[[list[str], dict[str, list[str]], dict[str, Tenant]], None],
    ) -> None:
        self._config = config
        self._hashes = list(hashes)
        self._set_keys = set_keys
        self._lock = asyncio.Lock()

    async def reload(self) -> None:
        """Read the file, in a thread: it may lie on a disk that hangs. Keys of flags and the environment stay."""
        file = self._config.api_key_file
        if file is None:
            logger.warning("SIGHUP has no effect without --api-key-file or --tls-cert")
            return
        async with self._lock:
            try:
                from_file = await asyncio.to_thread(read_file_keys, file)
            except StartupError as error:
                logger.error("api keys not reloaded, the old ones stay valid: %s", error.message)
                return
            for notice in await asyncio.to_thread(file_notices, file):
                logger.warning("%s", notice)
            roles = merge_roles(self._config.given_key_hashes, from_file.roles)
            old, new = self._hashes, list(roles)
            added, removed = len(set(new) - set(old)), len(set(old) - set(new))
            self._hashes = new
            self._set_keys(new, roles, from_file.tenants)
            logger.info("api keys reloaded file=%s keys=%d added=%d removed=%d", file, len(new), added, removed)


async def reload_tls(config: LaunchConfig, control: ControlServer) -> None:
    """Check the TLS files again, in a thread, and let every HTTP worker read them. Without TLS this does nothing."""
    if config.tls_cert is None or config.tls_key is None:
        return
    try:
        await asyncio.to_thread(check_tls, Tls(config.tls_cert, config.tls_key))
    except StartupError as error:
        logger.error("tls certificate not reloaded, the old one stays: %s", error.message)
    else:
        control.send(ReloadTls(), role="worker")
        logger.info("tls certificate reloaded file=%s", config.tls_cert)


async def reload_access(config: LaunchConfig, control: ControlServer, keys: KeyReloader) -> None:
    """Read the certificate and the keys again."""
    await reload_tls(config, control)
    if config.api_key_file is not None or config.tls_cert is None:
        await keys.reload()
