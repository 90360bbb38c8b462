"""Runs measuring scripts on the GPUs of one host: each in its own process, on its own GPUs, with its own time limit.

Scripts begin in the order given. One that has to wait for GPUs makes all later ones wait too, so the order decides what
runs at the same time. A script that fails or whose time is up is reported, and the others go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_POLL_S = 0.05
_RELEASE_S = 1.0  # until the memory of a killed process is free


@dataclass(frozen=True)
class Script:
    """One process: `python -m` with these arguments.

    share: of each of its GPUs. Scripts whose shares of a GPU add up to at most 1 run at the same time.
    """

    part: str
    name: str
    command: tuple[str, ...]
    num_gpus: int
    timeout_s: float
    share: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """The end of a script: done | failed | timed out | left out."""

    script: Script
    status: str
    seconds: float = 0.0
    gpus: tuple[str, ...] = ()
    output: str = ""


class GpuScripts:
    """Runs scripts in order. Life: run(), which calls `on_end` with each outcome."""

    def __init__(self, gpus: Sequence[str], *, folder: Path, end_s: float, on_end: Callable[[Outcome], None]) -> None:
        """gpus: their names for CUDA_VISIBLE_DEVICES. folder: for the output of scripts that still run.

        end_s: the time of time.monotonic() by which all are ended; no script begins that has less than half of its
        time limit left.
        """
        self._gpus, self._folder, self._end_s, self._on_end = gpus, folder, end_s, on_end
        self._running: list[_Running] = []

    def run(self, scripts: Sequence[Script]) -> None:
        """Run all. Blocks; whatever ends it ends the processes, too."""
        waiting = deque(scripts)
        try:
            while waiting or self._running:
                for running in list(self._running):
                    self._end(running)
                while waiting and self._begin(waiting[0]):
                    waiting.popleft()
                time.sleep(_POLL_S)
        finally:
            for running in self._running:
                _kill(running.process)

    def _begin(self, script: Script) -> bool:
        """Start a script, or leave it out; return False if it has to wait."""
        timeout_s = min(script.timeout_s, self._end_s - time.monotonic())
        if script.num_gpus > len(self._gpus) or timeout_s < script.timeout_s / 2:
            self._on_end(Outcome(script, "left out"))
            return True
        gpus = self._free(script)
        if gpus is None:
            return False
        output = self._folder / f"{script.name}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *script.command],
                cwd=_ROOT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        started_s = time.monotonic()
        self._running.append(_Running(script, process, gpus, output, started_s, started_s + timeout_s))
        return True

    def _free(self, script: Script) -> tuple[str, ...] | None:
        """Return the neighbours with the most room, or None."""
        used = dict.fromkeys(self._gpus, 0.0)
        for running in self._running:
            for gpu in running.gpus:
                used[gpu] += running.script.share
        size = script.num_gpus
        groups = [tuple(self._gpus[first : first + size]) for first in range(0, len(self._gpus) - size + 1, size)]
        best = min(groups, key=lambda group: max(used[gpu] for gpu in group))
        return best if max(used[gpu] for gpu in best) + script.share <= 1.001 else None

    def _end(self, running: _Running) -> None:
        """Report a script that has ended or whose time is up."""
        code, now_s = running.process.poll(), time.monotonic()
        if code is None and now_s < running.end_s:
            return
        _kill(running.process)  # also what an ended script has left
        if code is None:
            time.sleep(_RELEASE_S)
        self._running.remove(running)
        status = "timed out" if code is None else "failed" if code else "done"
        output = running.output.read_text(errors="replace")
        self._on_end(Outcome(running.script, status, now_s - running.started_s, running.gpus, output))


@dataclass
class _Running:
    script: Script
    process: subprocess.Popen[bytes]
    gpus: tuple[str, ...]
    output: Path
    started_s: float
    end_s: float


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a script and its children; the kernel ends ranks, whose parent is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
