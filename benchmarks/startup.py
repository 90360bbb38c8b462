"""Seconds from `quire serve` to readiness, per stage, and from an engine's death to the next, for the real shapes.

Measured with an empty Triton cache and with a full one. A table of stages follows, and what the engine logs of them.

    python -m benchmarks.startup --shapes qwen3-0.6b llama-3.1-8b --warm-starts 2 --json out.json
    python -m benchmarks.startup --trees /tmp/before . --restarts 1         # two checkouts in turns
The first start of a machine also reads torch from its disk; warm starts measured without a cold one follow it. Random
weights, a synthetic tokenizer (benchmarks/online.py). Quire's modules and all packages are compiled to bytecode before,
as pip does when it installs them, also where Python may write none. Trees share a kernel cache: the first one's cold
start compiles what is the same in the others. Other flags are passed to `quire serve`.
"""

import argparse
import compileall
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.online import write_model_folder

_PACKAGES = ("engine", "kernels", "models", "server")
_SHAPES = Path(__file__).parent / "shapes"
_READY = re.compile(r"Ready in ([\d.]+) s")
_AGAIN = re.compile(r"engine ready again after_s=([\d.]+)")
_STAGES = re.compile(r'start="([^"]*)"')
_COMPILED = re.compile(r"kernels compiled=.*")
_LATER = re.compile(r"graphs captured=\d+ (?:urgent=\d+ )?later=[1-9]")
_ALL_CAPTURED = re.compile(r"late graphs captured=.*")
_PARTS = re.compile(
    r"(?:imports done|load imports_s=|weights read ahead|graphs warm_up_s=|graphs captured=|late graphs captured=|"
    r"graph captured in)"
    r".*|graph not captured.*"
)


def main() -> int:
    """Start and stop the daemon for each shape, first with an empty cache; print a line per start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--warm-starts", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=1_000_000, help="starts of each tree whose engine is killed")
    parser.add_argument("--trees", nargs="+", default=["."], help="checkouts to start in turns")
    parser.add_argument("--log", default="", help="where to append the daemons' logs")
    parser.add_argument("--json", default="")
    args, flags = parser.parse_known_args()
    packages = [Path(path) for path in sys.path if Path(path).is_dir() and Path(path).resolve() != Path.cwd()]
    for path in [*packages, *(Path(tree, package) for tree in args.trees for package in _PACKAGES)]:
        compileall.compile_dir(path, quiet=2, workers=0)
    starts = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            write_model_folder(_SHAPES / shape / "config.json", Path(folder))
            for number, tree in itertools.product(range(1 + args.warm_starts), args.trees):
                start = measure_start(
                    folder, cache, flags, log=args.log, tree=tree, kills_engine=number < args.restarts
                )
                name = shape if len(args.trees) == 1 else f"{shape} {Path(tree).resolve().name}"
                start = {"shape": name, "cache": "warm" if number else "cold", **start}
                print(name, start["cache"], start["seconds"], "again", start["engine_restart_seconds"], flush=True)
                starts.append(start)
    print(stage_table(starts))
    if args.json:
        report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "server_flags": flags, "starts": starts}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure_start(
    folder: str, cache: str, flags: list[str], *, log: str = "", tree: str = ".", kills_engine: bool = True
) -> dict[str, object]:
    """Start the daemon, wait until its log says that it is ready, kill its engine, wait for the next one, stop it.

    Returns the seconds by this process's clock, by the daemon's log, and per stage, the log's line on compiling
    kernels, and the seconds without an engine. Raises RuntimeError if the daemon exits before.
    tree: the checkout to start. kills_engine: if False, the seconds of what follows are None.
    """
    command = [sys.executable, "-m", "server", "serve", folder, "--load-format", "dummy", "--port", "0", *flags]
    started_s = time.monotonic()
    server = subprocess.Popen(
        command, cwd=tree, stderr=subprocess.PIPE, text=True, env={**os.environ, "TRITON_CACHE_DIR": cache}
    )
    lines: list[str] = []

    def read_until(pattern: re.Pattern[str]) -> re.Match[str]:
        for line in server.stderr or []:
            lines.append(line)
            if found := pattern.search(line):
                return found
        raise RuntimeError("the daemon ended before it was ready:\n" + "".join(lines[-20:]))

    try:
        ready = read_until(_READY)
        elapsed_s = time.monotonic() - started_s
        all_captured_s = again_s = None
        if kills_engine:
            if any(_LATER.search(line) for line in lines):
                read_until(_ALL_CAPTURED)
            all_captured_s = round(time.monotonic() - started_s, 2)
            os.kill(engine_of(server.pid), signal.SIGKILL)
            again_s = float(read_until(_AGAIN)[1])
    finally:
        if log:
            with Path(log).open("a") as file:
                file.writelines(lines)
        server.terminate()
        server.communicate(timeout=30)
    text = "".join(lines)
    stages = _STAGES.search(text)
    first, _, restarted = text.partition("engine ready again")[0].partition("ended, restarting")
    return {
        "seconds": round(elapsed_s, 2),
        "daemon_seconds": float(ready[1]),
        "stages": stages[1] if stages else "",
        "kernels": "; ".join(_COMPILED.findall(text)),
        "parts": _PARTS.findall(first),
        "all_graphs_seconds": all_captured_s,
        "engine_restart_seconds": again_s,
        "restart_parts": _PARTS.findall(restarted),
    }


def stage_table(starts: list[dict[str, object]]) -> str:
    """Return the seconds of each stage, a row for each stage and a column for each start, then the parts of each."""
    names = [f"{start['shape']} {start['cache']}" for start in starts]
    columns = [dict(_stage_seconds(str(start["stages"]))) for start in starts]
    stages = list(dict.fromkeys(stage for column in columns for stage in column))
    rows = [["stage", *names]]
    rows += [[stage, *(str(column.get(stage, "")) for column in columns)] for stage in stages]
    for name in ("daemon_seconds", "all_graphs_seconds", "engine_restart_seconds"):
        rows.append([name, *("" if start[name] is None else str(start[name]) for start in starts)])
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for name, start in zip(names, starts, strict=True):
        parts = start["parts"]
        assert isinstance(parts, list)
        lines += [f"{name}: {part}" for part in [*filter(None, [start["kernels"]]), *parts]]
    return "\n".join(lines)


def _stage_seconds(text: str) -> list[tuple[str, float]]:
    """Return the stages of the daemon's line: "imports 4.2 s, config 0.4 s"."""
    return [(stage, float(seconds)) for stage, seconds in re.findall(r"(\w+) ([\d.]+) s", text)]


def engine_of(launcher: int) -> int:
    """Return the pid of a launcher's engine. Raises StopIteration if it has none now."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(int(pid) for pid in children if b"engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes())


if __name__ == "__main__":
    sys.exit(main())
