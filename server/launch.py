"""The launcher: owns the port, the children, the metrics registry and the end. Imports engine and server; never torch.

    launcher ── control socket ──┬── HTTP worker 0 … n ──┐
                                 └── engine ─────────────┴── engine socket
Life: bind (before anything heavy) → launch → children start side by side → ready → watch and restart → drain on SIGTERM
or SIGINT: workers finish their streams, then the engine goes. A second signal ends everything at once.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
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
from server.children import Backoff, describe_exit, end_child, kill_child, start_child
from server.console import Summary, make_console
from server.control_server import ControlServer
from server.exposition import Exposition
from server.listener import server_url
from server.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

_ENGINE_MODULE = "engine.process"
_WORKER_MODULE = "server.worker"
_DRAIN_GRACE_S = 5.0  # what a worker gets beyond its drain timeout to send the last error events
_ENGINE_END_S = 3.0


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
        engine_module: str = _ENGINE_MODULE,
    ) -> None:
        self._config = config
        self._listeners = listeners
        self._run_dir = run_dir
        self._engine_module = engine_module
        self._started_s = time.monotonic()
        self._engine_socket = str(run_dir / "engine.sock")
        self._control_socket = str(run_dir / "control.sock")
        self._write_configs(engine_config, server_config)
        self._model_name = server_config.served_model_names[0]
        self._exposition = Exposition(model_name=self._model_name, version=importlib.metadata.version("quire"))
        self._control = ControlServer(exposition=self._exposition, on_message=self._on_message)
        self._console = make_console(config.log_format)
        self._url = server_url(config.host, listeners[0])
        self._engine: asyncio.subprocess.Process | None = None
        self._workers: dict[int, asyncio.subprocess.Process] = {}
        self._failures: dict[tuple[str, int], EngineFailed] = {}
        self._greeted_workers: set[int] = set()
        self._facts: dict[str, str] = {}
        self._has_been_ready = False
        self._drain_until_s: float | None = None
        self._announced = asyncio.Event()
        self._changed = asyncio.Condition()
        self._exit_code: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Start the children and keep them until a signal or a failed start; return the exit code."""
        loop = asyncio.get_running_loop()
        self._exit_code = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._control.start(self._control_socket)
        logger.info("listening url=%s", self._url)
        self._spawn(self._keep_engine())
        for index in range(self._config.http_workers):
            self._spawn(self._keep_worker(index))
        try:
            return await self._exit_code
        finally:
            self._console.stop()
            for task in self._tasks:
                task.cancel()
            await self._control.aclose()
            children = [process for process in (self._engine, *self._workers.values()) if process is not None]
            for process in children:
                kill_child(process)
            await asyncio.gather(*(process.wait() for process in children))
