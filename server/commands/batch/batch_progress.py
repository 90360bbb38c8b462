"""How far a batch is: a bar on a terminal, a line now and then elsewhere. Imports rich only on a terminal."""

import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_EVERY_S = 10.0


class BatchProgress:
    """Counts answers and failures, and shows them. Life: made → count … → close."""

    def __init__(self, stream: TextIO, *, total: int, kept: int) -> None:
        self.num_answered = 0
        self.num_failed = 0
        self._stream = stream
        self._total = total
        self._kept = kept
        self._started_s = time.monotonic()
        self._told_s = self._started_s
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if stream.isatty():
            self._bar, self._task = _make_bar(stream, total=total, completed=kept)
            self._bar.start()

    def count(self, *, is_answered: bool) -> None:
        """Count one record."""
        if is_answered:
            self.num_answered += 1
        else:
            self.num_failed += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, failed=f"{self.num_failed:,} failed" if self.num_failed else "")
        elif time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._told_s = time.monotonic()
            rate = (self.num_answered + self.num_failed) / (self._told_s - self._started_s)
            done = self._kept + self.num_answered + self.num_failed
            self._say(f"batch done={done} of={self._total} failed={self.num_failed} rate={rate:.1f}/s")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def summary(self) -> str:
        """Return what became of all lines."""
        elapsed_s = time.monotonic() - self._started_s
        kept = f", {self._kept:,} were there already" if self._kept else ""
        rest = self._total - self._kept - self.num_answered - self.num_failed
        left = f", {rest:,} are left" if rest else ""
        return f"{self.num_answered:,} answered, {self.num_failed:,} failed{kept}{left}, in {elapsed_s:.1f} s"

    def _say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def _make_bar(stream: TextIO, *, total: int, completed: int) -> "tuple[Progress, TaskID]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("Batch"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("[red]{task.fields[failed]}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
    )
    return bar, bar.add_task("batch", total=total, completed=completed, failed="")
