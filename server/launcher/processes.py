"""Child processes of the launcher: their start and end. Imports engine.interface.config.

A child has its own process group, so that Ctrl-C in a terminal reaches only the launcher and streams can finish. A
child never outlives the launcher: the control connection closes, and on Linux the kernel sends a signal.
Tasks holds the asyncio tasks that an object starts without awaiting them.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.interface.child_process import PROJECT_ROOT, die_with
from engine.interface.config import LaunchConfig

_ENOUGH_FILES = 65_536  # a higher limit only makes those loops longer that close what a child shall not inherit


class Backoff:
    """Delays between restarts: 0.5 s, doubling to `last_s`, and 0.5 s again after a minute of health."""

    FIRST_S = 0.5
    LAST_S = 30.0
    WORKER_LAST_S = 2.0  # a worker loads nothing large, and without one nobody is served
    HEALTHY_S = 60.0

    def __init__(self, last_s: float = LAST_S) -> None:
        self._next_s = self.FIRST_S
        self._last_s = last_s
        self.num_ended = 0  # in a row, without a minute of health

    def next(self, *, healthy_s: float) -> float:
        """Return how long to wait after a process that was healthy for so long."""
        if healthy_s >= self.HEALTHY_S:
            self._next_s, self.num_ended = self.FIRST_S, 0
        self.num_ended += 1
        delay_s, self._next_s = self._next_s, min(self._next_s * 2, self._last_s)
        return delay_s


async def start_child(
    module: str, config: Path, *, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start `python -m module config` from the project's root, so that no other package shadows ours.

    environment: variables beside the launcher's own.
    """
    launcher_pid = os.getpid()
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        str(config),
        cwd=PROJECT_ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=pass_fds,
        env={**os.environ, **environment} if environment else None,
        process_group=0,
        preexec_fn=lambda: die_with(launcher_pid),
    )


async def end_child(process: asyncio.subprocess.Process, *, timeout_s: float) -> None:
    """Wait for a child that was asked to end, then kill it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()
    kill_child(process)
    await process.wait()


def kill_child(process: asyncio.subprocess.Process) -> None:
    """Kill a child, if it is running."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def num_oom_kills() -> int:
    """Return how many processes this machine's kernel has killed for want of memory; 0 where it does not tell."""
    try:
        fields = Path("/proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(fields[fields.index("oom_kill") + 1]) if "oom_kill" in fields else 0


def is_on_terminal() -> bool:
    """Return True if SIGHUP comes from this process's terminal: False under nohup, or once the terminal is closed."""
    return sys.stderr.isatty() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def raise_file_limit() -> None:
    """Raise the soft limit of open files, which children inherit, to the hard limit or a sufficient one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system with another opinion
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def child_log_format(config: LaunchConfig) -> str:
    """Return json or text: bars are the launcher's alone."""
    return "json" if config.log_format == "json" else "text"


class Tasks:
    """Holds each task while it runs, since asyncio does not. Life: spawn … → cancel.

    on_error: told when one raises; else asyncio logs it.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a task."""
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._done)

    def cancel(self) -> None:
        """Cancel the running tasks."""
        for task in self._running:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._on_error is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
