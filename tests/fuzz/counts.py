"""What a run of the fuzzer sent, and what came back: make fuzz ARGS="--fuzz-json FILE"."""

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

INPUTS: Counter[str] = Counter()  # by kind
STATUSES: Counter[str] = Counter()  # of replies, by class: "2xx"


def count(kind: str, statuses: Iterable[int] = ()) -> None:
    """Count an input, and the statuses of the replies to it."""
    INPUTS[kind] += 1
    STATUSES.update(f"{status // 100}xx" for status in statuses)


def report(*, max_examples: int, seconds: float, num_failed: int) -> dict[str, object]:
    """Return what was counted since the start. max_examples: of each property."""
    machine = {
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "max_examples": max_examples,
        "seconds": round(seconds),
        "inputs": dict(INPUTS),
        "statuses": {name: STATUSES[name] for name in sorted(STATUSES)},
        "num_5xx": STATUSES["5xx"],
        "failed_tests": num_failed,
    }


def write(path: Path, found: dict[str, object]) -> None:
    """Write a report."""
    path.write_text(json.dumps(found, indent=1) + "\n")
