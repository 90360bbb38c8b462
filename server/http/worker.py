"""The HTTP worker process: `python -m server.http.worker CONFIG.json` (server.config.serve_config.WorkerConfig).

Life: connect to the launcher and the engine → serve on the inherited socket → drain, on request or when the
launcher has ended → open requests finish or time out → the engine connection closes, which ends the rest with an
error event → exit 0. Never imports torch.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import uvicorn
from fastapi import FastAPI

from engine.interface.errors import StartupError, sentence
from engine.interface.logs import configure_logging
from server.config.serve_config import WorkerConfig
from server.http.h11_protocol import ConnectionLimit, HttpProtocol
from server.http.launcher_link import LauncherLink
from server.http.worker_app import WorkerApp

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75  # above the 60 s of common proxies, so that they close idle connections first
_POLL_S = 0.05
_GREETING_S = 5.0  # the engine greets between two steps
_LAST_WORDS_S = 2.0  # for the error events of requests that did not finish in time


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher decides when a worker ends. on_start: called when it serves."""

    def __init__(self, config: uvicorn.Config, *, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(config: WorkerConfig) -> int:
    """Serve until told to end; return the exit code."""
    worker = WorkerApp(config.server)
    try:
        await worker.connect()
    except OSError:
        return 1  # the launcher is gone already
    launcher = worker.launcher
    try:
        app = worker.make_app()
    except StartupError as error:
        return await _fail(launcher, error.message, error.exit_code)
    except Exception as error:
        if config.debug:
            traceback.print_exc()
        reason = sentence(str(error).strip().partition("\n")[0])
        return await _fail(launcher, f"HTTP worker: {type(error).__name__}: {reason}", 3)
    if (
        launcher.state.stage.name == "ready"
    ):  # a restarted worker must know the engine's limits before its first request
        await worker.wait_ready(timeout_s=_GREETING_S)
    server = _Server(_uvicorn_config(app, config), on_start=launcher.serve)
    launcher.on_reload_tls = lambda: _reload_tls(server.config)
    worker.http_metrics.num_connections = lambda: len(server.server_state.connections)
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=config.listen_fd)]))
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    told = asyncio.create_task(launcher.wait_end())
    terminating = asyncio.create_task(terminated.wait())
    await asyncio.wait([serving, told, terminating], return_when=asyncio.FIRST_COMPLETED)
    is_failed = serving.done()
    if not is_failed:
        timeout_s = told.result() if told.done() else 0.0
        await _wait_idle(server, timeout_s=timeout_s, must_end=lambda: terminated.is_set() or not launcher.is_connected)
    await worker.disconnect_engine()
    await _wait_idle(server, timeout_s=_LAST_WORDS_S)
    told.cancel()
    terminating.cancel()
    server.should_exit = True
    await serving
    await worker.aclose()
    return 3 if is_failed else 0


def _uvicorn_config(app: FastAPI, config: WorkerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(HttpProtocol, limit=ConnectionLimit()),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_LAST_WORDS_S),
    )


def _reload_tls(config: uvicorn.Config) -> None:
    """Use the files' certificate for new connections. A worker that does not serve yet reads them when it does."""
    if not config.loaded or config.ssl is None or config.ssl_certfile is None:
        return
    try:
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl):  # a fault must not leave half of a pair
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:
        logger.error("tls certificate not reloaded, the old one stays reason=%r", str(error))


async def _wait_idle(server: uvicorn.Server, *, timeout_s: float, must_end: Callable[[], bool] = lambda: False) -> None:
    """Wait until no request is being answered, at most `timeout_s`. New ones get a 503 from the app meanwhile."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while server.server_state.tasks and loop.time() < end_s and not must_end():
        await asyncio.sleep(_POLL_S)


async def _fail(launcher: LauncherLink, message: str, exit_code: int) -> int:
    launcher.fail(message, exit_code)
    await launcher.aclose()
    return exit_code


def main() -> int:
    """Entry point of `python -m server.http.worker CONFIG.json`."""
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkerConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(
        level=config.log_level, log_format=config.log_format, process=f"worker-{config.server.worker_index}"
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of what clients did wrong, which our own lines tell
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(config))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop where it is installed (not on Windows), else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
