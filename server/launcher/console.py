"""Console: shows the stages of a start and the closing panel, on a terminal (bars) or in the log (text or JSON).

Life: stage … → ready, or stop when the start fails. StageTimes measures each stage, so that a slow one is visible;
its caller passes the clock. Imports engine.interface.control; rich on a terminal only.
"""

import contextlib
import json
import logging
import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from engine.interface.control import Stage

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)
_UNIX = "unix:"
_STAGE_LABELS = {
    "imports": "Starting the engine",
    "standby": "Waiting for the running daemon",
    "config": "Reading the model's configuration",
    "kernels": "Preparing kernels",
    "ranks": "Waiting for the other GPUs",
    "weights": "Loading weights",
    "kv_cache": "Sizing the KV cache",
    "graphs": "Capturing graphs",
    "self_test": "Generating a first token",
}
_LEAST_S = 0.05  # shorter stages are not worth a word


@dataclass(frozen=True)
class Summary:
    """The contents of the closing panel. facts: label → text, as measured by the engine."""

    model_name: str
    url: str
    facts: dict[str, str]
    num_keys: int
    elapsed_s: float

    def rows(self) -> dict[str, str]:
        """Return the panel's rows in order."""
        rows = {"Model": self.model_name, **self.facts, "API": self._api(), "Auth": self._auth()}
        if "Model" in self.facts and self.model_name not in self.facts["Model"]:
            rows["Model"] = f"{self.model_name} ({self.facts['Model']})"
        return rows

    def next_command(self) -> str:
        """Return a curl command that works without changes."""
        body = json.dumps({"model": self.model_name, "messages": [{"role": "user", "content": "Hello!"}]})
        socket_path = self.url.removeprefix(_UNIX)
        target = self.url if socket_path == self.url else f"--unix-socket {shlex.quote(socket_path)} http://localhost"
        key = ' -H "authorization: Bearer $QUIRE_API_KEY"' if self.num_keys else ""
        return f"curl {target}/v1/chat/completions{key} -H 'content-type: application/json' -d {shlex.quote(body)}"

    def _api(self) -> str:
        return self.url if self.url.startswith(_UNIX) else f"{self.url}/v1"

    def _auth(self) -> str:
        if not self.num_keys:
            return "none, so every client that reaches this address may use it"
        return f"API key ({self.num_keys} known)" if self.num_keys > 1 else "API key"


class Console(Protocol):
    """Shows the start of the daemon."""

    def stage(self, stage: Stage) -> None:
        """Show the stage of the start."""
        ...

    def ready(self, summary: Summary) -> None:
        """Show the closing panel."""
        ...

    def stop(self) -> None:
        """Remove progress bars from the screen."""
        ...


def make_console(log_format: str, stream: TextIO) -> Console:
    """Return bars on `stream` when the format is "auto" and it is a terminal, log lines otherwise."""
    is_terminal = stream.isatty() and os.environ.get("TERM", "") != "dumb"
    return TerminalConsole(stream) if log_format == "auto" and is_terminal else LogConsole()


class LogConsole:
    """Writes a log line when a stage begins and another when its units are done."""

    def __init__(self) -> None:
        self._last: tuple[str, bool] | None = None

    def stage(self, stage: Stage) -> None:
        is_done = stage.total > 0 and stage.done >= stage.total
        if (stage.name, is_done) == self._last or stage.name == "ready":
            return
        self._last = (stage.name, is_done)
        logger.info("stage name=%s%s", stage.name, stage_fields(stage))

    def ready(self, summary: Summary) -> None:
        for label, text in summary.rows().items():
            logger.info("%s=%s", label.lower().replace(" ", "_"), json.dumps(text, ensure_ascii=False))
        logger.info("Ready in %.1f s url=%s", summary.elapsed_s, summary.url)

    def stop(self) -> None:
        pass


class TerminalConsole:
    """Draws progress bars while the model loads, then a panel. rich honours NO_COLOR.

    Writes to a closed terminal are ignored; SIGHUP reports that it is closed.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as RichConsole

        self._rich = RichConsole(file=stream, highlight=False)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def stage(self, stage: Stage) -> None:
        with contextlib.suppress(OSError):
            self._show_stage(stage)

    def ready(self, summary: Summary) -> None:
        with contextlib.suppress(OSError):
            self._show_panel(summary)

    def stop(self) -> None:
        progress, self._progress = self._progress, None
        self._tasks = {}
        if progress is not None:
            with contextlib.suppress(OSError):
                progress.stop()

    def _show_stage(self, stage: Stage) -> None:
        progress = self._progress or self._start()
        label = _STAGE_LABELS.get(stage.name)
        for name, task in self._tasks.items():
            if name != stage.name:
                total = progress.tasks[task].total or 1
                progress.update(task, total=total, completed=total)
        if label is None:
            return
        if stage.name not in self._tasks:
            self._tasks[stage.name] = progress.add_task(label, total=None, detail="")
        progress.update(
            self._tasks[stage.name],
            total=stage.total or None,
            completed=stage.done,
            detail=_amount(stage) or stage.detail,
        )

    def _show_panel(self, summary: Summary) -> None:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        self.stop()
        table = Table.grid(padding=(0, 2))
        for label, text in summary.rows().items():
            table.add_row(Text(label, style="dim"), Text(text))
        self._rich.print(Panel(table, title="Quire", title_align="left", expand=False))
        self._rich.print(Text.assemble(("Ready", "bold green"), f" in {summary.elapsed_s:.1f} s. Try it:"))
        self._rich.print(Text("  " + summary.next_command()), soft_wrap=True)
        self._rich.print(Text("Ctrl-C stops it.", style="dim"))

    def _start(self) -> "Progress":
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=self._rich,
            transient=True,
        )
        self._progress.start()
        return self._progress


def stage_fields(stage: Stage) -> str:
    """Return a log line's fields of a stage, except its name."""
    progress = f" done={stage.done} total={stage.total} unit={stage.unit}" if stage.total else ""
    return progress + (f" detail={json.dumps(stage.detail, ensure_ascii=False)}" if stage.detail else "")


def stage_text(stage: Stage) -> str:
    """Return the stage of the start as one line."""
    label = _STAGE_LABELS.get(stage.name, stage.name)
    more = _amount(stage) or stage.detail
    return f"{label}: {more}" if more else label


class StageTimes:
    """Measures stages, from the stage `first` on. Call enter() when a stage begins; a stage may begin again."""

    def __init__(self, first: str, now: float) -> None:
        self._name = first
        self._since_s = now
        self._seconds = {first: 0.0}

    def enter(self, name: str, now: float) -> None:
        """End the stage that runs and begin another, or go on with the same."""
        self._seconds[self._name] += now - self._since_s
        self._seconds.setdefault(name, 0.0)
        self._name, self._since_s = name, now

    def text(self, now: float) -> str:
        """Return the stages in order, the one that runs as if it ended now: "process 0.3 s, imports 2.7 s"."""
        self.enter(self._name, now)
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items() if seconds >= _LEAST_S)


def _amount(stage: Stage) -> str:
    """Return the finished part of a stage, in its unit."""
    if not stage.total:
        return ""
    if stage.unit == "bytes":
        unit, size = ("GiB", 2**30) if stage.total >= 2**30 else ("MiB", 2**20)
        return f"{stage.done / size:.1f} of {stage.total / size:.1f} {unit}"
    return f"{stage.done} of {stage.total} {stage.unit}".rstrip()
