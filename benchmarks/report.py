"""Shared parts of the benchmark commands: errors, machine facts, JSON files, plain tables. Never imports torch."""

import json
import os
import platform
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from server.config.version import package_version

Report = dict[str, Any]


class BenchError(Exception):
    """A benchmark cannot start or continue; the message is one sentence. exit_code: 2 for wrong usage, else 1."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def now() -> str:
    """Return the date and time for a report."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def host_facts() -> dict[str, str | int | None]:
    """Return the facts of the machine and of this process's software."""
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "os": platform.platform(aliased=True, terse=True),
        "python": platform.python_version(),
        "quire": package_version(),
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return a command as typed in a shell, without its keys, its passwords and the folders of absolute paths."""
    words = ["quire", *without_folders(arguments)]
    for i, word in enumerate(words):
        flag, separator, value = word.partition("=")
        if not separator and i + 1 < len(words):
            value = words[i + 1]
        if flag == "--api-key":
            value = "HIDDEN"
        elif flag == "--url":
            value = re.sub(r"^([A-Za-z]+://)?[^/@]*@", r"\1HIDDEN@", value)
        else:
            continue
        if separator:
            words[i] = f"{flag}={value}"
        elif i + 1 < len(words):
            words[i + 1] = value
    return shlex.join(words)


def without_folders(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the last part alone of each absolute path, also behind `--flag=`.

    What a command measures does not depend on the folders of a machine, and results are published.
    """
    return [re.sub(r"^(--[\w-]+=)?/(?:[^/]*/)*(?=[^/])", r"\1", word) for word in arguments]


def load_json(path: str) -> object:
    """Read a JSON file. Raises BenchError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise BenchError(f"{path} cannot be read: {reason}.", exit_code=2) from error


def write_report(path: str, report: Report) -> None:
    """Write a report as JSON. Raises BenchError."""
    try:
        Path(path).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json {path} cannot be written: {error.strerror}.") from error


def check_outputs(*, json_path: str | None, plot_path: str | None, html_path: str | None) -> None:
    """Raise BenchError if a result cannot be written; called before the measurement."""
    for flag, path in (("--json", json_path), ("--plot", plot_path), ("--html", html_path)):
        if path and not (Path(path).parent.is_dir() and os.access(Path(path).parent, os.W_OK)):
            raise BenchError(f"{flag} {path}: its folder does not exist or cannot be written to.", exit_code=2)
        if path and flag != "--json" and find_spec("matplotlib") is None:
            raise BenchError(f"{flag} needs matplotlib: pip install matplotlib.", exit_code=2)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format columns of text, the first left-aligned, the others right-aligned; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cpu_name() -> str | None:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or None
