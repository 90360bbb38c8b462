"""WorkerApp: builds the ASGI app of an HTTP worker with its connections to launcher and engine, and its metrics.

Used by server/http/worker.py with its own uvicorn and by server/hosted/app.py in another ASGI server. Never torch.
Life: connect → make_app, which blocks while the tokenizer loads → served → disconnect_engine, which ends open
requests with an error event → aclose, which sends the last counts.
"""

import asyncio
import gc
import sys

from fastapi import FastAPI

from engine.interface.client import EngineClient
from engine.interface.config import ServerConfig
from engine.interface.metrics import Metrics
from engine.interface.paired_client import PairedEngineClient
from engine.interface.socket_client import SocketEngineClient
from server.api.request_record import OpenRequests
from server.config.version import package_version
from server.http.app import create_app
from server.http.launcher_link import LauncherLink
from server.http.metrics import HttpMetrics
from server.http.tracing import Tracer

# New objects for a collection of the youngest; Python's 700 would make several full ones of each large body.
# LargeBodies makes full ones rarer while it holds any
COLLECT_EVERY = 10_000
# How long a thread computes on while the event loop waits for the interpreter, in seconds. With Python's 0.005 three
# threads with large bodies kept the loop waiting for over 0.1 s together; with this for a third, and 2 % more CPU
SWITCH_S = 0.001


class WorkerApp:
    """One worker's app and its connections. Use inside one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._metrics = Metrics()
        self._open_requests = OpenRequests()
        self._tracer: Tracer | None = None
        self._lag: asyncio.Task[None] | None = None
        self.http_metrics = HttpMetrics(
            self._metrics, num_requests=lambda: len(self._open_requests), adapters=config.lora_names
        )
        self.launcher = LauncherLink(
            config.control_socket,
            worker_index=config.worker_index,
            metrics=self._metrics,
            on_cancel=self._open_requests.cancel,
            before_send=self.http_metrics.record_state,
        )
        decode_sockets = config.decode_sockets or [config.engine_socket]
        num_local = len(config.prefill_sockets) - config.num_remote
        prefill = [SocketEngineClient(path, is_remote=i >= num_local) for i, path in enumerate(config.prefill_sockets)]
        if len(decode_sockets) == 1:
            decode = [
                SocketEngineClient(
                    decode_sockets[0],
                    max_replays=config.max_replays,
                    num_ends=lambda: self.launcher.state.num_ends,
                    was_killed=lambda: self.launcher.state.was_killed,
                    has_given_up=self._has_given_up,
                    moved_to=lambda: self.launcher.state.engine_socket,
                    metrics=self._metrics,
                )
            ]
        else:  # their requests go on in another one
            decode = [SocketEngineClient(path) for path in decode_sockets]
        self._sockets = [*prefill, *decode]
        self._local = [*prefill[:num_local], *decode]
        self.client: EngineClient = decode[0]
        if prefill or len(decode) > 1:
            self.client = PairedEngineClient(
                prefill,
                decode,
                min_tokens=config.min_prefill_tokens,
                max_replays=config.max_replays,
                metrics=self._metrics,
                has_given_up=self._has_given_up,
                names=config.engine_names,
                first_decode=config.first_decode,
            )

    async def connect(self) -> None:
        """Connect to the launcher, and to the engine once it listens. Raises OSError without a launcher."""
        await self.launcher.start()
        for client in self._sockets:
            await client.start()

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Wait up to timeout_s for the greetings of this host's engines."""
        await asyncio.gather(*(client.wait_ready(timeout_s=timeout_s) for client in self._local))

    def make_app(self) -> FastAPI:
        """Load the model's text side and return the app. Raises StartupError."""
        if self._config.otlp_traces_endpoint is not None:
            self._tracer = Tracer(
                self._config.otlp_traces_endpoint,
                model_name=self._config.served_model_names[0],
                version=package_version(),
                instance=f"worker-{self._config.worker_index}",
            )
        app = create_app(
            self._config,
            client=self.client,
            launcher=self.launcher,
            metrics=self._metrics,
            open_requests=self._open_requests,
            http_metrics=self.http_metrics,
            tracer=self._tracer,
        )
        self._lag = asyncio.create_task(self.http_metrics.watch_lag())
        gc.collect()
        gc.freeze()  # what lives as long as the worker: each full collection would walk it while all threads wait
        gc.set_threshold(COLLECT_EVERY)
        sys.setswitchinterval(SWITCH_S)
        return app

    def _has_given_up(self) -> bool:
        """Return whether no engine is to be expected soon: restarts fail, or the load of the next one stands still."""
        state = self.launcher.state
        is_stuck = state.fault == "stalled" and state.stage.name != "ready"
        return state.fault == "dead" or is_stuck or not self.launcher.is_connected

    async def disconnect_engine(self) -> None:
        """End open requests with an error event, and refuse new ones."""
        await self.client.aclose()

    async def aclose(self) -> None:
        """Send the last counts, and close every connection."""
        await self.disconnect_engine()
        if self._lag is not None:
            self._lag.cancel()
        await self.launcher.aclose()
        if self._tracer is not None:
            self._tracer.close()
