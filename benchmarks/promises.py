"""Measures what docs/reference/promises.md shows: runs the parts one after another, each into a file of its own.

    python -m benchmarks.promises [PART …] [--folder benchmarks/results]
Without a PART all are measured, which takes about five hours, two of them for the soak; those that need a GPU only on
a host that has one. A file of benchmarks/results
takes the place of the earlier one of its part. `make reference-pages` writes the page from them.
"""

import argparse
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu_memory import gpu_names

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Part:
    """One measurement. stem: of its file's name, before the date. command: as one types it; option: for the file."""

    stem: str
    command: str
    option: str = "--json"
    needs_gpu: bool = False

    def words(self, path: Path) -> list[str]:
        """Return the command's words with the file that it is to write."""
        program, *words = shlex.split(self.command)
        if program == "make":
            return [program, *words, f"ARGS={self.option} {path}"]
        return [sys.executable, *words, self.option, str(path)]

    def has_file(self, folder: Path = RESULTS) -> bool:
        """Return whether it has been measured."""
        return any(folder.glob(f"{self.stem}-[0-9]*.json"))

    def newest(self, folder: Path = RESULTS) -> Path:
        """Return its newest file. Raises ValueError if there is none."""
        return max(folder.glob(f"{self.stem}-[0-9]*.json"))


PARTS = {
    "kills": Part("kills-cpu", "python -m benchmarks.kills --streams 20 --kills 100 --every 5"),
    "kills-standby": Part(
        "kills-standby-cpu", "python -m benchmarks.kills --streams 20 --kills 100 --every 5 --standby"
    ),
    "kills-200-streams": Part(
        "kills-200-streams-cpu", "python -m benchmarks.kills --streams 200 --seconds 120 --every 5"
    ),
    "kills-gpu": Part("standby-gpu-llama-3.1-8b", "python -m benchmarks.standby_gpu --tokens 512", needs_gpu=True),
    "kills-gpu-eager": Part(
        "standby-gpu-eager-llama-3.1-8b",
        "python -m benchmarks.standby_gpu --kills 0 --streams 2 --tokens 128 --enforce-eager",
        needs_gpu=True,
    ),
    "kills-gpu-demo": Part(
        "standby-gpu-demo", "python -m benchmarks.standby_gpu --shape demo --kills 1 --tokens 600", needs_gpu=True
    ),
    "drain": Part("drain-cpu", "python -m benchmarks.drain --streams 40 --rounds 5"),
    "overload": Part("overload-simulated", "python -m benchmarks.overload"),
    "overload-daemon": Part("overload-daemon-cpu", "python -m benchmarks.overload_daemon"),
    "flood-gpu": Part("flood-llama-3.1-8b", "python -m benchmarks.flood", needs_gpu=True),
    "fuzz": Part("fuzz-cpu", "make fuzz", "--fuzz-json"),
    "attacks": Part("chaos-cpu", "make chaos"),
    "soak": Part("soak-cpu", "make soak HOURS=2"),
}


def run(part: Part, folder: Path) -> int:
    """Measure one part; return the exit code of its command. Its earlier files go if it has written one."""
    path = folder / f"{part.stem}-{datetime.now(UTC):%Y-%m-%d}.json"
    written_s = path.stat().st_mtime if path.exists() else 0.0
    returncode = subprocess.run(part.words(path), check=False).returncode
    if path.exists() and path.stat().st_mtime > written_s:
        for earlier in folder.glob(f"{part.stem}-[0-9]*.json"):
            if earlier != path:
                earlier.unlink()
    return returncode


def main() -> int:
    """Measure the named parts; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promises", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all that this host can without one"
    )
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    failed, gpus = [], gpu_names()
    for name in args.parts or [name for name in PARTS if gpus or not PARTS[name].needs_gpu]:
        print(f"{name}: {PARTS[name].command}", flush=True)
        if run(PARTS[name], args.folder.resolve()):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "make reference-pages writes the page")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
