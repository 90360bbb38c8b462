"""HostedApp: Quire's ASGI app inside another ASGI server, such as a Ray Serve replica. Never torch.

Its daemon (server/hosted/daemon.py: launcher, engine, restarts, metrics registry) is one child process, which
treats the host as HTTP worker 0. Life: HostedApp(flags) → start, which returns when the engine is ready → the host
serves the app and reads fault and metrics_page → aclose. Imports engine.interface and server.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec
from fastapi import FastAPI

from engine.interface.child_process import PROJECT_ROOT, describe_exit
from engine.interface.config import ServerConfig
from engine.interface.control import EngineFailed
from engine.interface.errors import StartupError
from engine.interface.logs import configure_logging
from server.hosted.daemon import APP_FILE, FAILURE_FILE, parse_flags
from server.http.worker_app import WorkerApp
from server.launcher.run_dir import RunDir

logger = logging.getLogger(__name__)

_DAEMON_MODULE = "server.hosted.daemon"
_POLL_S = 0.05
_STOP_S = 10.0


class HostedApp:
    """One app and its daemon. Use inside one event loop, on any thread."""

    def __init__(self, flags: Sequence[str]) -> None:
        """flags: MODEL and flags of `quire serve`, less those of a port. Raises StartupError if they are wrong."""
        self._flags = list(flags)
        self._arguments = parse_flags(flags)
        self._folder = RunDir()  # for the daemon's files before its sockets exist
        self._process: subprocess.Popen[bytes] | None = None
        self._worker: WorkerApp | None = None

    async def start(self) -> FastAPI:
        """Start the daemon; return the app once its engine serves. Raises StartupError, and leaves nothing then."""
        log_format = "json" if self._arguments.log_format == "json" else "text"
        configure_logging(level=self._arguments.log_level, log_format=log_format, process="worker-0")
        try:
            return await self._start()
        except BaseException:
            await self.aclose()
            raise

    @property
    def fault(self) -> str:
        """The reason in words why the app cannot generate now; "" without a fault."""
        if self._worker is None or self._process is None:
            return "it was not started"
        if self._process.poll() is not None:
            return f"its launcher {describe_exit(self._process.returncode)}"
        state = self._worker.launcher.state
        if state.fault:
            return "the engine makes no progress" if state.fault == "stalled" else "the engine has died"
        if not self._worker.launcher.is_connected:
            return "the connection to its launcher is lost"
        if state.stage.name != "ready":
            return f"the engine is not ready: {state.stage.name}"
        return "" if self._worker.client.ready is not None else "the connection to its engine is lost"

    @property
    def is_alive(self) -> bool:
        """False if the host should replace the daemon, by the rule of GET /health; True while it loads."""
        if self._worker is None or self._process is None or self._process.poll() is not None:
            return False
        launcher = self._worker.launcher
        return launcher.is_connected and launcher.state.is_alive

    async def metrics_page(self) -> bytes:
        """Return the page of GET /metrics. Raises EngineError when the launcher does not answer in time."""
        assert self._worker is not None, "start() first"
        return await self._worker.launcher.scrape()

    async def aclose(self) -> None:
        """End open requests with an error event, then the daemon."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.aclose()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)
        self._folder.remove()

    async def _start(self) -> FastAPI:
        self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork and exec, once
            [sys.executable, "-m", _DAEMON_MODULE, str(self._folder.path), str(os.getpid()), *self._flags],
            cwd=PROJECT_ROOT,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        worker = await self._connect()
        self._worker = worker
        app = worker.make_app()
        while self.fault:
            self._check_alive()
            await asyncio.sleep(_POLL_S)
        return app

    async def _connect(self) -> WorkerApp:
        """Return the app's connections, once the launcher listens."""
        path = self._folder.path / APP_FILE
        while True:
            self._check_alive()
            with contextlib.suppress(OSError, msgspec.DecodeError):  # not there, half written, or not listening yet
                worker = WorkerApp(msgspec.json.decode(path.read_bytes(), type=ServerConfig))
                await worker.connect()
                return worker
            await asyncio.sleep(_POLL_S)

    def _check_alive(self) -> None:
        """Raise StartupError with the daemon's own reason if it has ended."""
        assert self._process is not None
        if self._process.poll() is None:
            return
        failure = EngineFailed(f"The daemon {describe_exit(self._process.returncode)}.", exit_code=3)
        with contextlib.suppress(OSError):
            failure = msgspec.json.decode((self._folder.path / FAILURE_FILE).read_bytes(), type=EngineFailed)
        raise StartupError(failure.message, exit_code=failure.exit_code)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to the daemon, then kill it; its engine ends with it. Blocks."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        logger.error("the daemon has not ended in time and is killed pid=%d", process.pid)
        process.kill()
        process.wait()
