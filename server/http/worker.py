"""The HTTP worker process: `python -m server.http.worker CONFIG.json` (server.config.serve_config.WorkerConfig).

Life: connect to the launcher and the engine → serve on the inherited socket → drain, on request or when the
launcher has ended → open requests finish or time out → the engine connection closes, which ends the rest with an
error event → exit 0. When another daemon has taken the port over, it serves the connections that are open, and ends
after the last one. Never imports torch.
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
_CLOSE = (b"connection", b"close")
_HANDSHAKE_S = 3.0  # of TLS: a connection counts after it


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher decides when a worker ends. on_start: called when it serves."""

    def __init__(self, config: uvicorn.Config, *, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._sockets: list[socket.socket] = []
        self._has_port = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._sockets = sockets or []
        await super().startup(sockets)
        if self.started:
            self._on_start()
            if not self._has_port:
                self.stop_accepting()

    def stop_accepting(self) -> None:
        """Leave new connections to the other processes that have the sockets. An open one closes after its next reply.

        An idle one must not be closed at once: its client may have sent a request that is on its way.
        """
        self._has_port = False
        if not self.started:
            return
        for server in self.servers:
            server.close()
        for listener in self._sockets:
            listener.close()
        self.config.encoded_headers.append(_CLOSE)  # uvicorn's default headers are made of these every second
        self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]

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
    if not await launcher.wait_accept():
        await worker.aclose()
        return 0
    if (
        launcher.state.stage.name == "ready"
    ):  # a restarted worker must know the engine's limits before its first request
        await worker.wait_ready(timeout_s=_GREETING_S)
    server = _Server(_uvicorn_config(app, config), on_start=launcher.serve)
    launcher.on_reload_tls = lambda: _reload_tls(server.config)
    _follow_hand_over(launcher, server)
    worker.http_metrics.num_connections = lambda: len(server.server_state.connections)
    sockets = [socket.socket(fileno=number) for number in (config.listen_fd, *config.more_listen_fds)]
    serving = asyncio.create_task(server.serve(sockets=sockets))
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    told = asyncio.create_task(launcher.wait_end())
    terminating = asyncio.create_task(terminated.wait())
    handed_over = asyncio.create_task(launcher.handed_over.wait())
    ends = [serving, told, terminating]
    await asyncio.wait([*ends, handed_over], return_when=asyncio.FIRST_COMPLETED)
    if handed_over.done():
        await _wait_unconnected(
            server,
            least_s=_POLL_S if config.tls_cert is None else _HANDSHAKE_S,
            must_end=lambda: any(end.done() for end in ends),
        )
    is_failed = serving.done()
    if not is_failed:
        timeout_s = told.result() if told.done() else 0.0
        await _wait_idle(server, timeout_s=timeout_s, must_end=lambda: terminated.is_set() or not launcher.is_connected)
    await worker.disconnect_engine()
    await _wait_idle(server, timeout_s=_LAST_WORDS_S)
    for task in (told, terminating, handed_over):
        task.cancel()
    server.should_exit = True
    await serving
    await worker.aclose()
    return 3 if is_failed else 0


def _follow_hand_over(launcher: LauncherLink, server: _Server) -> None:
    """Accept no more once another daemon has the port, which it may have by now: the message comes once."""
    launcher.on_handed_over = server.stop_accepting
    if launcher.handed_over.is_set():
        server.stop_accepting()


def _uvicorn_config(app: FastAPI, config: WorkerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(HttpProtocol, limit=ConnectionLimit(), prefix=config.server.root_path),  # type: ignore[arg-type]
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


async def _wait_unconnected(server: uvicorn.Server, *, least_s: float, must_end: Callable[[], bool]) -> None:
    """Wait until no connection is open: an idle one closes after its keep-alive time, any other after its reply."""
    loop = asyncio.get_running_loop()
    least_end_s = loop.time() + least_s
    while (server.server_state.connections or loop.time() < least_end_s) and not must_end():
        await asyncio.sleep(_POLL_S)


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
