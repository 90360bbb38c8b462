"""What every benchmark command shares: errors, the machine's facts, JSON files, plain tables. Never imports torch."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Report = dict[str, Any]


class BenchError(Exception):
    """A benchmark cannot run or go on; the message is one sentence. exit_code: 2 for wrong usage, else 1."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def now() -> str:
    """The date and time that stand beside every figure."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def host_facts() -> dict[str, str | int | None]:
    """The machine this process runs on."""
    return {"cpu_count": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}


def read_report(path: str, benchmark: str) -> Report:
    """Read a report that `quire bench BENCHMARK` wrote earlier. Raises BenchError."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise BenchError(f"--compare {path} cannot be read: {reason}.", exit_code=2) from error
    if not isinstance(report, dict) or report.get("benchmark") != benchmark:
        raise BenchError(f"--compare {path} is not a report of quire bench {benchmark}.", exit_code=2)
    return report


def write_report(path: str, report: Report) -> None:
    """Write a report as JSON. Raises BenchError."""
    try:
        Path(path).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json {path} cannot be written: {error.strerror}.") from error


def check_outputs(*, json_path: str | None, plot_path: str | None) -> None:
    """Raise BenchError if a result could not be written, before minutes are spent on measuring it."""
    for flag, path in (("--json", json_path), ("--plot", plot_path)):
        if path and not (Path(path).parent.is_dir() and os.access(Path(path).parent, os.W_OK)):
            raise BenchError(f"{flag} {path}: its folder does not exist or cannot be written to.", exit_code=2)
    if plot_path and find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install 'quire[bench]'.", exit_code=2)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first to the left and the others to the right; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
