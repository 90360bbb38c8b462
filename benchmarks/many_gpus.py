"""Two, four or eight GPUs of one host: `python -m benchmarks.many_gpus FOLDER [--max-seconds N] [--only NAME ...]`.

Tests and measurements, the most important first, each in its own process with its own time limit (gpu_scripts.py,
many_gpus_scripts.py). One that fails is named, and the others still run. FOLDER gets one JSON file, written anew after
each script, and one log with the output of all. The file names every script from the beginning; SIGTERM ends the run as
the time limit does. A table is printed last; `--table FILE` prints the one of a file. `--plan` prints what would run
when, on which GPUs, and in how many seconds, and needs no GPU. `--device cpu` tries every script at small sizes on four
CPU ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import router
from benchmarks.gpu_scripts import DONE, FAILED, TIMED_OUT, GpuScripts, Outcome, Script, plan
from benchmarks.kernel_timing import machine_facts
from benchmarks.many_gpus_scripts import CPU, GPU, MORE_PARTS, PARTS, SIZES, scripts
from benchmarks.many_gpus_table import format_plan, format_summary
from benchmarks.report import BenchError, Report, host_facts, without_folders

NOT_BEGUN = "not begun"
_TEST = re.compile(r"^(tests/\S+) (PASSED|FAILED|SKIPPED|ERROR)", re.MULTILINE)
_MAX_S = 475.0


def main() -> int:
    """Run the chosen parts; return 1 if a script failed, ran out of time or was left out."""
    args = _parser().parse_args()
    if args.table:
        if args.folder is None:
            sys.exit("benchmarks.many_gpus: --table needs the JSON file of a run.")
        print(format_summary(json.loads(args.folder.read_text())))
        return 0
    if args.plan and args.device == "cpu":
        sys.exit("benchmarks.many_gpus: --plan knows the seconds of GPUs alone; leave --device cpu out.")
    gpus = _gpus(args)
    if len(gpus) < SIZES[0]:
        sys.exit("benchmarks.many_gpus needs two GPUs.")
    sizes = GPU if args.device == "cuda" else CPU
    if os.path.exists(args.router):
        args.router = os.path.abspath(args.router)  # the scripts have a working directory of their own
    chosen = choose(list(scripts(sizes, len(gpus), router=args.router)), args.only)
    if args.plan:
        print(format_plan(plan(chosen, gpus, limit_s=args.max_seconds), num_gpus=len(gpus), limit_s=args.max_seconds))
        return 0
    if args.folder is None:
        sys.exit("benchmarks.many_gpus needs a FOLDER for its results.")
    with tempfile.TemporaryDirectory() as folder:
        if any(script.part == "replicas" for script in chosen):
            try:
                router.find_router(args.router, Path(folder))  # before time on the GPUs is spent
            except BenchError as error:
                sys.exit(f"benchmarks.many_gpus: {error}")
    return _run(args, chosen, gpus)


def _run(args: argparse.Namespace, chosen: Sequence[Script], gpus: Sequence[str]) -> int:
    args.folder.mkdir(parents=True, exist_ok=True)
    report: Report = {
        "host": host_facts(),
        "num_gpus": len(gpus),
        "max_seconds": args.max_seconds,
        "seconds": 0.0,
        "scripts": {script.name: to_report(Outcome(script, NOT_BEGUN), None) for script in chosen},
    } | machine_facts()
    stem = args.folder / f"many-gpus-{len(gpus)}x{_word(report['gpu'], args.device)}-{datetime.now(UTC).date()}"
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, stem.with_suffix(".log").open("w") as log:

        def write() -> None:
            report["seconds"] = round(time.monotonic() - started_s, 1)
            stem.with_suffix(".json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")

        def on_end(outcome: Outcome) -> None:
            name = outcome.script.name
            line = f"{name}: {outcome.status} after {outcome.seconds:.0f} s on {','.join(outcome.gpus)}"
            print(line, flush=True)
            log.write(f"== {line}\n{' '.join(outcome.script.command)}\n{outcome.output}\n")
            log.flush()
            report["scripts"][name] = to_report(outcome, Path(folder, f"{name}.json"))
            write()

        write()
        commands = [_with_json(script, Path(folder, f"{script.name}.json")) for script in chosen]
        end_s = started_s + args.max_seconds
        GpuScripts(gpus, folder=Path(folder), end_s=end_s, on_end=on_end, stop=stop).run(commands)
    print(format_summary(report))
    return int(any(found["status"] != DONE for found in report["scripts"].values()))


def choose(found: Sequence[Script], only: Sequence[str]) -> list[Script]:
    """Return the scripts of these names and parts, in their order. Ends the process if there is no such name."""
    names = {*PARTS, *MORE_PARTS, *(script.name for script in found)}
    if unknown := [name for name in only if name not in names]:
        sys.exit(f"benchmarks.many_gpus: --only {' '.join(unknown)}: choose from {', '.join(sorted(names))}.")
    return [script for script in found if script.part in only or script.name in only]


def _with_json(script: Script, path: Path) -> Script:
    if script.command[0] == "pytest":
        return script
    return dataclasses.replace(script, command=(*script.command, "--json", str(path)))


def to_report(outcome: Outcome, path: Path | None) -> Report:
    """Return a script's end, and the results of its tests or its own JSON, as far as it came. path: of that JSON."""
    script = outcome.script
    report: Report = {
        "part": script.part,
        "command": " ".join(("python", "-m", *without_folders(script.command))),
        "gpus": list(outcome.gpus),
        "status": outcome.status,
        "seconds": round(outcome.seconds, 1),
        "expected_s": script.expected_s or None,
    }
    if script.command[0] == "pytest":
        report["result"] = dict(_TEST.findall(outcome.output))
    elif path is not None and (result := _read(path)) is not None:
        report["result"] = result
    if outcome.status in (FAILED, TIMED_OUT):
        report["end_of_output"] = outcome.output[-2000:]
    return report


def _word(gpu: str, device: str) -> str:
    """Return a word for the file names: h100, h200, cpu."""
    found = re.search(r"[A-Z]+\d+", gpu)
    return "cpu" if device == "cpu" else found[0].lower() if found else "gpu"


def _read(path: Path) -> Report | None:
    """Return a script's JSON; None if there is none, or half of one because it was ended while it wrote."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _gpus(args: argparse.Namespace) -> list[str]:
    """Return the names of the GPUs for CUDA_VISIBLE_DEVICES; those of four ranks on a CPU, of --gpus in a plan."""
    if args.plan or args.device == "cpu":
        return [str(rank) for rank in range(args.gpus if args.plan else 4)]
    count = torch.cuda.device_count()
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_gpus", description=__doc__)
    words = "for the JSON and the log; with --table the JSON file itself; with --plan none"
    parser.add_argument("folder", type=Path, nargs="?", help=words)
    words = f"{', '.join(PARTS)}, or scripts of theirs; {' and '.join(MORE_PARTS)} run only if they are named"
    parser.add_argument("--only", nargs="+", default=PARTS, metavar="NAME", help=words)
    parser.add_argument("--router", default=router.VLLM_ROUTER, metavar="NAME|PATH|none", help=router.HELP)
    words = f"all are ended after N seconds ({_MAX_S:g})"
    parser.add_argument("--max-seconds", type=float, default=_MAX_S, metavar="N", help=words)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--table", action="store_true", help="print the table of an earlier run, and run nothing")
    parser.add_argument("--plan", action="store_true", help="print what runs when, and run nothing")
    parser.add_argument("--gpus", type=int, choices=SIZES, default=4, help="number of GPUs of --plan (4)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
