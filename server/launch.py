"""The launcher: owns the port, the children, the metrics registry and the end. Imports engine and server; never torch.

    launcher ── control socket ──┬── HTTP worker 0 … n ──┐
                                 └── engine ─────────────┴── engine socket
Life: bind (before anything heavy) → launch → children start side by side → ready → watch and restart → drain on SIGTERM
or SIGINT: workers finish their streams, then the engine goes. A second signal ends everything at once.
"""

import asyncio
import importlib.metadata
import logging
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig, LaunchConfig, ServerConfig
from engine.control import Drain, EngineFailed, Facts, Hello, Stage
from engine.errors import StartupError
from engine.logs import configure_logging
from engine.process import EngineProcessConfig
from engine.protocol import EngineReady, FromEngine
from engine.transport import read_messages
from server.children import Backoff, WorkerConfig, describe_exit, end_child, kill_child, start_child
from server.console import Summary, make_console
from server.control_server import ControlServer
from server.exposition import Exposition
from server.listener import is_ready, server_url

logger = logging.getLogger(__name__)

_ENGINE_MODULE = "engine.process"
_WORKER_MODULE = "server.worker"
_DRAIN_GRACE_S = 5.0  # what a worker gets beyond its drain timeout to send the last error events
_ENGINE_END_S = 3.0
_PROBE_INTERVAL_S = 0.05


def launch(
    config: LaunchConfig,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listeners: Sequence[socket.socket],
    *,
    engine_module: str = _ENGINE_MODULE,
) -> int:
    """Run the daemon on `listeners` until it is stopped; return the exit code. Blocks."""
    log_format = "json" if config.log_format == "json" else "text"
    configure_logging(level=config.log_level, log_format=log_format, process="launcher")
    run_dir = _make_run_dir()
    try:
        launcher = Launcher(config, engine_config, server_config, listeners, run_dir, engine_module=engine_module)
        return asyncio.run(launcher.run())
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


class Launcher:
    """One daemon. `run` is its whole life."""

    def __init__(
        self,
        config: LaunchConfig,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listeners: Sequence[socket.socket],
        run_dir: Path,
        *,
        engine_module: str,
    ) -> None:
        self._config = config
        self._engine_config = engine_config
        self._server_config = server_config
        self._listeners = listeners
        self._run_dir = run_dir
        self._engine_module = engine_module
        self._started_s = time.monotonic()
        self._engine_socket = str(run_dir / "engine.sock")
        self._control_socket = str(run_dir / "control.sock")
        self._exposition = Exposition(
            model_name=server_config.served_model_names[0], version=importlib.metadata.version("quire")
        )
        self._control = ControlServer(exposition=self._exposition, on_message=self._on_message)
        self._console = make_console(config.log_format)
        self._url = server_url(config.host, listeners[0])
        self._engine: asyncio.subprocess.Process | None = None
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._failures: dict[tuple[str, int], EngineFailed] = {}
        self._greeted_workers: set[int] = set()
        self._facts: dict[str, str] = {}
        self._has_engine_been_ready = False
        self._is_announced = False
        self._drain_until_s: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Start the children and keep them until a signal; return the exit code. Raises StartupError."""
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._control.start(self._control_socket)
        logger.info("listening url=%s", self._url)
        self._spawn(self._keep_engine())
        for index in range(self._config.http_workers):
            self._spawn(self._keep_worker(index))
        try:
            return await self._exit
        finally:
            self._console.stop()
            for task in self._tasks:
                task.cancel()
            await self._control.aclose()
            children = [process for process in (self._engine, *self._workers.values()) if process is not None]
            for process in children:
                kill_child(process)
            await asyncio.gather(*(process.wait() for process in children))

    async def _keep_engine(self) -> None:
        """Start the engine, and again whenever it ends, with back-off. A first start that fails ends the daemon."""
        path = self._write_config(
            "engine.json",
            EngineProcessConfig(
                engine=self._engine_config,
                engine_socket=self._engine_socket,
                control_socket=self._control_socket,
                log_level=self._config.log_level,
                log_format=self._child_log_format(),
                debug=self._config.debug,
            ),
        )
        backoff = Backoff()
        while True:
            started_s = time.monotonic()
            self._engine = await start_child(self._engine_module, path)
            returncode = await self._engine.wait()
            if self._drain_until_s is not None:
                return
            if self._has_engine_been_ready:
                self._control.set_state(stage=Stage("restarting"))
            await self._control.settle("engine", 0)
            failure = self._failures.pop(("engine", 0), None)
            reason = failure.message if failure else f"The engine process {describe_exit(returncode)}."
            if not self._has_engine_been_ready:
                self._fail(reason, failure.exit_code if failure else 3)
                return
            self._exposition.reset_gauges()
            self._control.set_state(stage=Stage("restarting", detail=reason))
            delay_s = backoff.next(uptime_s=time.monotonic() - started_s)
            logger.error("engine ended, restarting delay_s=%g reason=%r", delay_s, reason)
            await asyncio.sleep(delay_s)
            self._exposition.count("engine_restarts_total")

    async def _keep_worker(self, index: int) -> None:
        """Start an HTTP worker, and again whenever it ends. A first start that fails ends the daemon."""
        listener = self._listeners[index % len(self._listeners)]
        path = self._write_config(
            f"worker-{index}.json",
            WorkerConfig(
                server=msgspec.structs.replace(
                    self._server_config,
                    engine_socket=self._engine_socket,
                    control_socket=self._control_socket,
                    worker_index=index,
                ),
                listen_fd=listener.fileno(),
                log_level=self._config.log_level,
                log_format=self._child_log_format(),
                debug=self._config.debug,
            ),
        )
        backoff = Backoff()
        while True:
            started_s = time.monotonic()
            worker = self._workers[index] = await start_child(_WORKER_MODULE, path, pass_fds=[listener.fileno()])
            returncode = await worker.wait()
            if self._drain_until_s is not None:
                if len(self._listeners) > 1:
                    listener.close()  # or the kernel would go on giving this worker's share to nobody
                return
            await self._control.settle("worker", index)
            failure = self._failures.pop(("worker", index), None)
            reason = failure.message if failure else f"HTTP worker {index} {describe_exit(returncode)}."
            if not self._is_announced and (failure is not None or index not in self._greeted_workers):
                self._fail(reason, failure.exit_code if failure else 3)
                return
            delay_s = backoff.next(uptime_s=time.monotonic() - started_s)
            logger.error("worker ended, restarting worker=%d delay_s=%g reason=%r", index, delay_s, reason)
            await asyncio.sleep(delay_s)

    def _on_message(self, hello: Hello, message: Any) -> None:
        match message:
            case Hello(role="worker", index=index):
                self._greeted_workers.add(index)
                if self._drain_until_s is not None:
                    remaining_s = max(self._drain_until_s - time.monotonic(), 0.0)
                    self._control.send(Drain(remaining_s), role="worker", index=index)
            case Stage() if hello.role == "engine":
                self._control.set_state(stage=message)
                if not self._has_engine_been_ready:
                    self._console.stage(message)
                if message.name == "ready":
                    self._spawn(self._learn_limits())
                    if not self._has_engine_been_ready:
                        self._has_engine_been_ready = True
                        self._spawn(self._announce())
            case Facts(rows):
                self._facts = rows
            case EngineFailed():
                self._failures[hello.role, hello.index] = message

    async def _announce(self) -> None:
        """Show the closing panel once, when a client would find the daemon ready."""
        while not await is_ready(self._listeners[0]):
            await asyncio.sleep(_PROBE_INTERVAL_S)
        if self._is_announced or self._drain_until_s is not None:
            return
        self._is_announced = True
        self._console.ready(
            Summary(
                model_name=self._server_config.served_model_names[0],
                url=self._url,
                facts=self._facts,
                auth="none: whoever reaches this address may use it",
                elapsed_s=time.monotonic() - self._started_s,
            )
        )

    async def _learn_limits(self) -> None:
        """Read the size of the KV pool from the engine's greeting, as a worker does."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._engine_socket)
        except OSError:
            return  # it died again; the next one will say
        try:
            async for message in read_messages(reader, FromEngine):
                if isinstance(message, EngineReady):
                    self._exposition.set_cache_config(block_size=message.block_size, num_blocks=message.num_blocks)
                return
        finally:
            writer.close()

    def _on_signal(self, number: int) -> None:
        if self._drain_until_s is None:
            self._spawn(self._drain())
        elif not self._exit.done():
            logger.warning("second signal, ending now")
            self._exit.set_result(128 + number)

    async def _drain(self) -> None:
        """Let every stream finish or time out, then end the engine."""
        timeout_s = self._config.drain_timeout_s
        self._drain_until_s = time.monotonic() + timeout_s
        self._console.stop()
        logger.info("draining timeout_s=%g; a second signal ends it now", timeout_s)
        self._control.set_state(is_draining=True)
        self._control.send(Drain(timeout_s), role="worker")
        await asyncio.gather(
            *(end_child(worker, timeout_s=timeout_s + _DRAIN_GRACE_S) for worker in self._workers.values())
        )
        await self._control.aclose()
        if self._engine is not None:
            is_serving = self._control.state.stage.name == "ready"  # one that loads hears nothing
            await end_child(self._engine, timeout_s=_ENGINE_END_S if is_serving else 0.0)
        logger.info("stopped")
        if not self._exit.done():
            self._exit.set_result(0)

    def _fail(self, message: str, exit_code: int) -> None:
        if not self._exit.done():
            self._exit.set_exception(StartupError(message, exit_code=exit_code))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A task of the launcher that raises is a bug: end loudly instead of half-alive."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._exit.done():
            self._exit.set_exception(error)

    def _child_log_format(self) -> str:
        return "json" if self._config.log_format == "json" else "text"

    def _write_config(self, name: str, config: msgspec.Struct) -> Path:
        path = self._run_dir / name
        path.write_bytes(msgspec.json.encode(config))
        return path


def _make_run_dir() -> Path:
    """Make a 0700 directory for sockets. Its path is short: a unix socket's may have about 100 bytes."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="quire-", dir=parent if len(parent) < 64 else "/tmp"))
