"""StartupBanner: shows a start to the operator: its stages, then the panel with the address.

Life: begin → stage for each → make, once, when a client would find the daemon ready. Imports engine.interface,
server.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

from engine.interface.config import LaunchConfig, ServerConfig
from engine.interface.control import Stage
from server.config.model_source import model_facts
from server.launcher.console import Console, StageTimes, Summary
from server.launcher.engine_health import LoadWatchdog
from server.launcher.listener import is_ready, server_url

_PROBE_INTERVAL_S = 0.05
_HOSTED_URL = "(the address of its host)"


class StartupBanner:
    """Shows the progress of the first start on the console. listeners: none if a host serves the app."""

    def __init__(
        self, config: LaunchConfig, server: ServerConfig, listeners: Sequence[socket.socket], console: Console
    ) -> None:
        self.url = server_url(config, listeners[0]) if listeners else _HOSTED_URL
        self.is_made = False
        self._config = config
        self._server = server
        self._listeners = listeners
        self._console = console
        self._started_s = time.monotonic()
        self._watch = LoadWatchdog()
        self._times = StageTimes("process", self._started_s)
        self._facts: dict[str, str] = {}

    def begin(self, stage: Stage) -> None:
        """Show the first stage, before the engine sends one."""
        self._console.stage(stage)
        self._watch.see(stage)

    def add_facts(self, rows: dict[str, str]) -> None:
        """Add the engine's rows to the panel."""
        self._facts = model_facts(self._server.model) | rows

    def stage(self, stage: Stage) -> None:
        """Show a stage of the first start."""
        if not self.is_made:
            self._times.enter("http" if stage.name == "ready" else stage.name, time.monotonic())
            self._console.stage(stage)
            self._watch.see(stage)

    async def make(self, *, is_draining: Callable[[], bool], has_port: Callable[[], bool] = lambda: True) -> None:
        """Show the closing panel once, when a client would find the daemon ready.

        has_port: False while another daemon answers on it.
        """
        # in this order: a drain closes listeners
        while self._listeners and not is_draining() and not (has_port() and await self._is_ready()):
            await asyncio.sleep(_PROBE_INTERVAL_S)
        if self.is_made or is_draining():
            return
        self.is_made = True
        self._console.ready(
            Summary(
                model_name=self._server.served_model_names[0],
                url=self.url,
                facts={**self._facts, "Start": self._times.text(time.monotonic())},
                num_keys=len(self._server.api_key_hashes),
                elapsed_s=time.monotonic() - self._started_s,
            )
        )

    async def _is_ready(self) -> bool:
        return await is_ready(self._config, self._listeners[0])
