"""Two, four or eight GPUs of one host: `python -m benchmarks.many_gpus FOLDER [--max-seconds N] [--only NAME ...]`.

Tests and measurements, the most important first, each in its own process with its own time limit (gpu_scripts.py). One
that fails is named, and the others still run. FOLDER gets one JSON file, written anew after each script, and one log
with the output of all. A table is printed last; `--table FILE` prints the one of a file. `--device cpu` tries every
script at small sizes on four CPU ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu_scripts import GpuScripts, Outcome, Script
from benchmarks.kernel_timing import machine_facts
from benchmarks.many_gpus_table import format_summary
from benchmarks.report import Report, host_facts, without_folders

PARTS = ("tests", "mixtures", "sums", "offline", "served", "replicas", "mixtures-4")
_SIZES = (2, 4, 8)
_TEST = re.compile(r"^(tests/\S+) (PASSED|FAILED|SKIPPED|ERROR)", re.MULTILINE)
_TEST_SHARE = 0.25  # of a GPU: tests mostly import and compile
_WORKLOADS = ("single", "batch8", "mixed64", "prefill16")
_SERVER_FLAGS = ("--max-model-len", "8192", "--no-prefix-caching")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that the scripts run at: those of a device."""

    device: str
    dense: str  # shapes
    large: str
    experts: str
    workloads: tuple[str, ...]
    engine_flags: tuple[str, ...] = ()
    load_flags: tuple[str, ...] = ()  # of benchmarks.rank_loss and benchmarks.replicas
    cut_flags: tuple[str, ...] = ()
    quantization: str = "fp8"
    runs: int = 2  # the first mixed64 of a machine is slower


GPU = Sizes("cuda", "llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", _WORKLOADS)
CPU = Sizes(
    "cpu",
    "tiny",
    "tiny",
    "tiny-moe",
    ("alone", "eight"),
    engine_flags=("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MiB"),
    load_flags=("--concurrency", "2", "--rounds", "2", "--input-len", "8", "--output-len", "4", "--processes", "1"),
    cut_flags=("--kill-after", "0.2", "--cut-len", "1500"),
    runs=1,
)


def main() -> int:
    """Run the chosen parts; return 1 if a script failed, ran out of time or was left out."""
    args = _parser().parse_args()
    if args.table:
        print(format_summary(json.loads(args.folder.read_text())))
        return 0
    gpus = _gpus(args.device)
    if len(gpus) < _SIZES[0]:
        sys.exit("benchmarks.many_gpus needs two GPUs.")
    args.folder.mkdir(parents=True, exist_ok=True)
    report: Report = {"host": host_facts(), "num_gpus": len(gpus), "scripts": {}} | machine_facts()
    sizes = GPU if args.device == "cuda" else CPU
    stem = args.folder / f"many-gpus-{len(gpus)}x{_word(report['gpu'], args.device)}-{datetime.now(UTC).date()}"
    chosen = choose(list(scripts(sizes, len(gpus))), args.only)
    with tempfile.TemporaryDirectory() as folder, stem.with_suffix(".log").open("w") as log:

        def on_end(outcome: Outcome) -> None:
            name = outcome.script.name
            line = f"{name}: {outcome.status} after {outcome.seconds:.0f} s on {','.join(outcome.gpus)}"
            print(line, flush=True)
            log.write(f"== {line}\n{' '.join(outcome.script.command)}\n{outcome.output}\n")
            log.flush()
            report["scripts"][name] = to_report(outcome, Path(folder, f"{name}.json"))
            stem.with_suffix(".json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")

        commands = [_with_json(script, Path(folder, f"{script.name}.json")) for script in chosen]
        GpuScripts(gpus, folder=Path(folder), end_s=time.monotonic() + args.max_seconds, on_end=on_end).run(commands)
    print(format_summary(report))
    return int(any(found["status"] != "done" for found in report["scripts"].values()))


def choose(found: Sequence[Script], only: Sequence[str]) -> list[Script]:
    """Return the scripts of these names and parts, in their order. Ends the process if there is no such name."""
    names = {*PARTS, *(script.name for script in found)}
    if unknown := [name for name in only if name not in names]:
        sys.exit(f"benchmarks.many_gpus: --only {' '.join(unknown)}: choose from {', '.join(sorted(names))}.")
    return [script for script in found if script.part in only or script.name in only]


def scripts(sizes: Sizes, num_gpus: int) -> Iterator[Script]:
    """Yield every script, in the order in which they begin: neighbours in it share the GPUs."""
    counts = [count for count in _SIZES if count <= num_gpus]
    most = counts[-1]
    yield from _tests(counts)
    yield _offline("mixtures", sizes, sizes.experts, 2)
    yield _offline("mixtures", sizes, sizes.experts, 2, "--expert-parallel", suffix="-whole")
    yield _sums(sizes, 2)
    moe = ("benchmarks.moe_ranks", "--device", sizes.device, "--shapes", "qwen3-30b-a3b", "--ranks", "2,4")
    yield Script("mixtures", "moe-ranks", moe, 1, 90)
    yield _offline("offline", sizes, sizes.dense, 1)
    for count in counts[1:]:
        yield _sums(sizes, count)
    for count in counts[1:]:
        yield _offline("offline", sizes, sizes.dense, count)
        yield _offline("offline", sizes, sizes.large, count, runs=1, timeout_s=150, prefix="large-")
    eight_bits = ("--quantization", sizes.quantization)
    yield _offline("offline", sizes, sizes.large, 2, *eight_bits, suffix="-fp8", runs=1, timeout_s=150, prefix="large-")
    yield _offline("offline", sizes, sizes.dense, 2, timeout_s=150)
    shape = ("--shape", sizes.dense, *_SERVER_FLAGS, *sizes.engine_flags, *sizes.load_flags)
    split = ("--tensor-parallel-size", str(most))
    yield Script("served", f"served-tp{most}", ("benchmarks.rank_loss", *shape, *split, *sizes.cut_flags), most, 150)
    replicas = ("benchmarks.replicas", "--replicas", str(most), *shape)
    yield Script("replicas", f"replicas-{most}", replicas, most, 120)
    for count in counts[1:]:
        yield _offline("mixtures-4", sizes, sizes.experts, count)
        yield _offline("mixtures-4", sizes, sizes.experts, count, "--expert-parallel", suffix="-whole")


def _tests(counts: Sequence[int]) -> Iterator[Script]:
    """Yield the tests of several GPUs, those of most GPUs first."""
    yield _test("sums", "one_shot_all_reduce", counts[-1], 100)
    for count in reversed(counts):
        words = f"{count}_gpus or killed" if count == 2 else f"{count}_gpus"
        yield _test(f"split-{count}", "tensor_parallel", count, 170, "-k", words)
        if count == 2:
            for kind in ("graphs", "eager"):
                yield _test(f"experts-2-{kind}", "expert_parallel", 2, 170, "-k", f"2_gpus and {kind}")
        else:
            yield _test(f"experts-{count}", "expert_parallel", count, 170, "-k", f"{count}_gpus")
    yield _test("daemon", "tensor_parallel", 2, 90, "-k", "daemon")


def _test(name: str, module: str, num_gpus: int, timeout_s: float, *flags: str) -> Script:
    command = ("pytest", "-m", "gpu", "-vv", "-rfE", "--tb=short", "-p", "no:cacheprovider", *flags)
    file = f"tests/gpu/test_{module}_cuda.py"
    return Script("tests", f"tests-{name}", (*command, file), num_gpus, timeout_s, share=_TEST_SHARE)


def _sums(sizes: Sizes, count: int) -> Script:
    command = ("benchmarks.collectives", "--device", sizes.device, "--ranks", str(count))
    return Script("sums", f"sums-{count}", command, count, 80)


def _offline(
    part: str,
    sizes: Sizes,
    shape: str,
    count: int,
    *flags: str,
    suffix: str = "",
    prefix: str = "",
    runs: int | None = None,
    timeout_s: float = 120,
) -> Script:
    """Return one process of `quire bench offline`. prefix, suffix: what its name says of its shape and flags."""
    command = ("server", "bench", "offline", *sizes.workloads, "--shape", shape, "--runs", str(runs or sizes.runs))
    split = () if count == 1 else ("--tensor-parallel-size", str(count))
    name = f"{prefix if sizes.large == sizes.dense else ''}{shape}-tp{count}{suffix}"
    return Script(part, name, (*command, *split, *flags, *sizes.engine_flags), count, timeout_s)


def _with_json(script: Script, path: Path) -> Script:
    if script.part == "tests":
        return script
    return dataclasses.replace(script, command=(*script.command, "--json", str(path)))


def to_report(outcome: Outcome, path: Path) -> Report:
    """Return a script's end, and its own JSON or the results of its tests. path: of that JSON, if there is one."""
    script = outcome.script
    report: Report = {
        "part": script.part,
        "command": " ".join(("python", "-m", *without_folders(script.command))),
        "gpus": list(outcome.gpus),
        "status": outcome.status,
        "seconds": round(outcome.seconds, 1),
    }
    if script.part == "tests":
        report["result"] = dict(_TEST.findall(outcome.output))
    elif path.is_file():
        report["result"] = json.loads(path.read_text())
    if outcome.status in ("failed", "timed out"):
        report["end_of_output"] = outcome.output[-2000:]
    return report


def _word(gpu: str, device: str) -> str:
    """Return a word for the file names: h100, h200, cpu."""
    found = re.search(r"[A-Z]+\d+", gpu)
    return "cpu" if device == "cpu" else found[0].lower() if found else "gpu"


def _gpus(device: str) -> list[str]:
    """Return the names of the GPUs for CUDA_VISIBLE_DEVICES; on a CPU those of four ranks."""
    if device == "cpu":
        return [str(rank) for rank in range(4)]
    count = torch.cuda.device_count()
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_gpus", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the JSON and the log; with --table the JSON file itself")
    words = f"{', '.join(PARTS)}, or scripts of theirs"
    parser.add_argument("--only", nargs="+", default=PARTS, metavar="NAME", help=words)
    parser.add_argument("--max-seconds", type=float, default=470.0, metavar="N", help="all are ended after N seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--table", action="store_true", help="print the table of an earlier run, and run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
