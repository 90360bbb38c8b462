"""One GPU measures every figure of docs/explanation/performance.md: `python -m benchmarks.record FOLDER`.

Measures starts, attention kernels, and for both shapes offline workloads, loads over HTTP and a step's profile. Each
script runs in its own process and writes JSON to FOLDER. About seven minutes on an H100. A failed script is named, and
the others still run.
"""

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

_SHAPES = ("qwen3-0.6b", "llama-3.1-8b")
_KINDS = ("startup", "offline", "online", "profile", "attention")
_SERVER_FLAGS = ("--max-model-len", "8192", "--no-prefix-caching")


def main() -> int:
    """Run every script; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hardware", default="h100", help="a word for the file names")
    parser.add_argument("--only", nargs="+", choices=_KINDS, default=_KINDS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    suffix = f"{args.hardware}-{datetime.now(UTC).date()}.json"
    failed = []
    for name, command in _commands().items():
        if name.partition("-")[0] not in args.only:
            continue
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *command, "--json", str(args.folder / f"{name}-{suffix}")]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _commands() -> dict[str, list[str]]:
    """Return each script's module and flags, by file name."""
    commands = {
        "startup": ["benchmarks.startup", "--warm-starts", "1"],
        "attention": ["server", "bench", "kernels"],
    }
    for shape in _SHAPES:
        workloads = ("single", "batch8", "mixed256", "prefill")
        commands[f"offline-{shape}"] = ["server", "bench", "offline", *workloads, "--shape", shape]
        commands[f"online-{shape}"] = ["benchmarks.online", "--shape", shape, *_SERVER_FLAGS]
        mixed = ("--mixed", "512", "1024", "2048", "--mixed-rows", "240" if shape == _SHAPES[0] else "60")
        commands[f"profile-{shape}"] = ["benchmarks.profile_step", "--shape", shape, *mixed]
    return commands


if __name__ == "__main__":
    sys.exit(main())
