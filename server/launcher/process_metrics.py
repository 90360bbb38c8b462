"""Metrics that the launcher measures at each scrape: readiness, engine progress; CPU, memory and files by role.

The launcher measures its children from outside, so that a busy or hung one is measured too. Reads /proc; on systems
other than Linux the process metrics are missing. Imports engine.interface and server.launcher.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.interface.control import State
from engine.interface.metrics import MetricsDelta
from server.launcher.engine_health import EngineDowntime, StepWatchdog

_PROC = Path("/proc")


class ProcessStats:
    """Keeps the last CPU times, so that the counter continues when a process is replaced."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._cpu_s: dict[int, float] = {}  # by pid

    def children(self, pid: int) -> list[int]:
        """Return the processes that this one started."""
        with contextlib.suppress(OSError):  # it has just ended, or the kernel does not tell
            lists = [path.read_text() for path in (self._proc / str(pid) / "task").glob("*/children")]
            return [int(child) for text in lists for child in text.split()]
        return []

    def sample(self, pids: dict[str, list[int]]) -> MetricsDelta:
        """Return the CPU time of each role since the last call, and its memory and files now."""
        delta, seen = MetricsDelta({}, {}, {}), {}
        if not self._proc.is_dir():
            return delta
        for role, role_pids in pids.items():
            used_s, resident, num_fds = 0.0, 0, 0
            for pid in role_pids:
                with contextlib.suppress(OSError):  # it has just ended
                    cpu_s, process_resident = _read_stat(self._proc / str(pid) / "stat")
                    used_s += max(0.0, cpu_s - self._cpu_s.get(pid, 0.0))
                    seen[pid] = cpu_s
                    resident += process_resident
                    num_fds += len(os.listdir(self._proc / str(pid) / "fd"))
            delta.counters["process_cpu_seconds_total", role] = used_s
            delta.gauges["process_resident_memory_bytes", role] = resident
            delta.gauges["process_open_fds", role] = num_fds
        self._cpu_s = seen
        return delta


class LauncherStats:
    """Reads the launcher's objects and changes none. children: by role and index, with ended ones."""

    def __init__(
        self,
        *,
        children: Mapping[tuple[str, int], asyncio.subprocess.Process],
        state: Callable[[], State],
        watch: StepWatchdog,
        downtime: EngineDowntime,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._children = children
        self._state = state
        self._watch = watch
        self._downtime = downtime
        self._processes = ProcessStats()
        self._started_s = clock()

    def sample(self) -> MetricsDelta:
        """Return the launcher's own metrics for the page."""
        pids: dict[str, list[int]] = {"launcher": [os.getpid()], "engine": [], "worker": []}
        for (role, _), process in self._children.items():
            if process.returncode is None:
                pids["engine" if role == "standby" else role].append(process.pid)
        for pid in pids["engine"][:]:
            pids["engine"] += self._processes.children(pid)  # the other ranks of its model
        delta, state = self._processes.sample(pids), self._state()
        is_up = state.stage.name == "ready" and not state.fault
        delta.gauges["engine_up", ""] = is_up
        delta.gauges["ready", ""] = state.stage.name == "ready" and not state.is_draining
        delta.gauges["engine_progress_age_seconds", ""] = self._watch.age_s
        delta.gauges["engine_restart_seconds", ""] = self._downtime.last_s
        delta.gauges["start_time_seconds", ""] = self._started_s
        return delta


def _read_stat(path: Path) -> tuple[float, int]:
    """Return CPU seconds and resident bytes. See proc_pid_stat(5): fields 14, 15 and 24."""
    fields = path.read_bytes().rpartition(b")")[2].split()  # the name before it may hold spaces; [0] is field 3
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu_s, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
