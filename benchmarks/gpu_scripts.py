"""Runs measuring scripts on the GPUs of one host: each in its own process, on its own GPUs, with its own time limit.

Scripts begin in the order given. One that has to wait for GPUs makes all later ones wait too, so the order decides what
runs at the same time: plan() says what that is. A script that fails or whose time is up is reported, and the others go
on; whatever ends the run itself, each script that has not ended is reported, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_POLL_S = 0.05
_RELEASE_S = 1.0  # until the memory of a killed process is free
DONE, FAILED, TIMED_OUT, ENDED, LEFT_OUT = "done", "failed", "timed out", "ended early", "left out"


@dataclass(frozen=True)
class Script:
    """One process: `python -m` with these arguments.

    share: of each of its GPUs. Scripts whose shares of a GPU add up to at most 1 run at the same time.
    expected_s: how long it takes; 0: not known. imports: a module that it imports, and that may be imported while it
    waits for all GPUs, because it uses none of them when it is imported; empty: none.
    """

    part: str
    name: str
    command: tuple[str, ...]
    num_gpus: int
    timeout_s: float
    share: float = 1.0
    expected_s: float = 0.0
    imports: str = ""

    @property
    def needed_s(self) -> float:
        """The least time with which it is worth a start."""
        return self.expected_s or self.timeout_s / 2


@dataclass(frozen=True)
class Outcome:
    """The end of a script: done | failed | timed out | ended early (by the end of the run) | left out."""

    script: Script
    status: str
    seconds: float = 0.0
    gpus: tuple[str, ...] = ()
    output: str = ""


@dataclass(frozen=True)
class Planned:
    """A script's place in a run in which each takes its expected time. gpus: none if it is left out."""

    script: Script
    gpus: tuple[str, ...]
    start_s: float
    end_s: float


def plan(scripts: Iterable[Script], gpus: Sequence[str], *, limit_s: float) -> list[Planned]:
    """Return the places of these scripts in a run of limit_s, by GpuScripts' rules, in their order."""
    now_s = 0.0
    found: list[Planned] = []
    for script in scripts:
        chosen = None
        while script.num_gpus <= len(gpus) and limit_s - now_s >= script.needed_s:
            chosen = _free_gpus(script, gpus, [(each.script, each.gpus) for each in found if each.end_s > now_s])
            if chosen is not None:
                break
            now_s = min(each.end_s for each in found if each.end_s > now_s)
        end_s = now_s if chosen is None else now_s + script.needed_s
        found.append(Planned(script, chosen or (), now_s, end_s))
    return found


class GpuScripts:
    """Runs scripts in order. Life: run(), which calls `on_end` with each outcome."""

    def __init__(
        self,
        gpus: Sequence[str],
        *,
        folder: Path,
        end_s: float,
        on_end: Callable[[Outcome], None],
        stop: threading.Event,
    ) -> None:
        """gpus: their names for CUDA_VISIBLE_DEVICES. folder: for the output of scripts that still run.

        end_s: the time of time.monotonic() by which all are ended; no script begins for which too little is left.
        stop: ends the run when it is set, as by a signal.
        """
        self._gpus, self._folder, self._end_s, self._on_end, self._stop = gpus, folder, end_s, on_end, stop
        self._running: list[_Running] = []
        self._prepared: _Prepared | None = None

    def run(self, scripts: Sequence[Script]) -> None:
        """Run all. Blocks; whatever ends it ends the processes, too, and reports each script that is not done."""
        waiting = deque(scripts)
        try:
            while (waiting or self._running) and not self._stop.is_set():
                for running in list(self._running):
                    self._end(running)
                while waiting and self._begin(waiting[0]):
                    waiting.popleft()
                time.sleep(_POLL_S)
        finally:
            self._drop_prepared()
            for running in self._running:
                _kill(running.process)
            now_s = time.monotonic()
            for running in self._running:
                self._on_end(running.outcome(ENDED, now_s))
            for script in waiting:
                self._on_end(Outcome(script, LEFT_OUT))

    def _begin(self, script: Script) -> bool:
        """Start a script, or leave it out; return False if it has to wait."""
        timeout_s = min(script.timeout_s, self._end_s - time.monotonic())
        if script.num_gpus > len(self._gpus) or timeout_s < script.needed_s:
            self._drop_prepared()
            self._on_end(Outcome(script, LEFT_OUT))
            return True
        gpus = _free_gpus(script, self._gpus, [(running.script, running.gpus) for running in self._running])
        if gpus is None:
            if self._prepared is None and script.imports and script.num_gpus == len(self._gpus):
                self._prepared = self._start(script, tuple(self._gpus), is_prepared=True)
            return False
        started, self._prepared = self._prepared, None
        if started is None:
            started = self._start(script, gpus)
        else:
            assert started.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it failed, and its exit code says so
                started.process.stdin.write(b"\n")
                started.process.stdin.close()
        now_s = time.monotonic()
        self._running.append(_Running(script, started.process, gpus, started.output, now_s, now_s + timeout_s))
        return True

    def _start(self, script: Script, gpus: tuple[str, ...], *, is_prepared: bool = False) -> _Prepared:
        """Start its process; with is_prepared it only imports, and waits for a line."""
        output = self._folder / f"{script.name}.out"
        prefix = ("benchmarks.prepared_script", script.imports) if is_prepared else ()
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *prefix, *script.command],
                cwd=_ROOT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE if is_prepared else subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return _Prepared(process, output)

    def _drop_prepared(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            _kill(prepared.process)

    def _end(self, running: _Running) -> None:
        """Report a script that has ended or whose time is up."""
        code, now_s = running.process.poll(), time.monotonic()
        if code is None and now_s < running.end_s:
            return
        _kill(running.process)  # also what an ended script has left
        if code is None:
            time.sleep(_RELEASE_S)
        self._running.remove(running)
        self._on_end(running.outcome(TIMED_OUT if code is None else FAILED if code else DONE, now_s))


@dataclass(frozen=True)
class _Prepared:
    process: subprocess.Popen[bytes]
    output: Path


@dataclass
class _Running:
    script: Script
    process: subprocess.Popen[bytes]
    gpus: tuple[str, ...]
    output: Path
    started_s: float
    end_s: float

    def outcome(self, status: str, now_s: float) -> Outcome:
        output = self.output.read_text(errors="replace")
        return Outcome(self.script, status, now_s - self.started_s, self.gpus, output)


def _free_gpus(
    script: Script, gpus: Sequence[str], running: Iterable[tuple[Script, tuple[str, ...]]]
) -> tuple[str, ...] | None:
    """Return the neighbours with the most room beside the running scripts, or None."""
    used = dict.fromkeys(gpus, 0.0)
    for other, its_gpus in running:
        for gpu in its_gpus:
            used[gpu] += other.share
    size = script.num_gpus
    groups = [tuple(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
    best = min(groups, key=lambda group: max(used[gpu] for gpu in group))
    return best if max(used[gpu] for gpu in best) + script.share <= 1.001 else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a script and its children; the kernel ends ranks, whose parent is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
