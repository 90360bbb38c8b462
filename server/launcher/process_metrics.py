"""What the launcher itself measures, at each scrape: is the daemon ready, does the engine go on, what processes use.

Imports engine's control messages and metrics, server's heartbeat, outage and process_stats.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping

from engine.interface.control import State
from engine.interface.metrics import MetricsDelta
from server.launcher.engine_health import HeartbeatWatch
from server.launcher.outage import Outage
from server.launcher.process_stats import ProcessStats


class LauncherStats:
    """Reads what the launcher owns and changes nothing of it. children: by role and index, ended ones included."""

    def __init__(
        self,
        *,
        children: Mapping[tuple[str, int], asyncio.subprocess.Process],
        state: Callable[[], State],
        watch: HeartbeatWatch,
        outage: Outage,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._children = children
        self._state = state
        self._watch = watch
        self._outage = outage
        self._processes = ProcessStats()
        self._started_s = clock()

    def sample(self) -> MetricsDelta:
        """Return what to merge into the page that is about to be rendered."""
        pids: dict[str, list[int]] = {"launcher": [os.getpid()], "engine": [], "worker": []}
        for (role, _), process in self._children.items():
            if process.returncode is None:
                pids[role].append(process.pid)
        for pid in pids["engine"][:]:
            pids["engine"] += self._processes.children(pid)  # the other ranks of its model
        delta, state = self._processes.sample(pids), self._state()
        is_up = state.stage.name == "ready" and not state.fault
        delta.gauges["engine_up", ""] = is_up
        delta.gauges["ready", ""] = state.stage.name == "ready" and not state.is_draining
        delta.gauges["engine_progress_age_seconds", ""] = self._watch.age_s
        delta.gauges["engine_restart_seconds", ""] = self._outage.last_s
        delta.gauges["start_time_seconds", ""] = self._started_s
        return delta
