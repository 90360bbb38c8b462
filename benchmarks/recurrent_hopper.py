"""Checks, then times, the kernels of recurrent layers' prompts for Hopper against Triton's, on one H100.

python -m benchmarks.recurrent_hopper [--seconds 130] [--json FILE]

- "before" is Triton's way, "hopper" what is served; "one" and "two" are the delta rule's scan by one or two warpgroups
  of a program; "phase" rows are the first phase alone.
- "check" rows are tests of tests/gpu/test_gluon_scan_cuda.py, each in a process of its own, so that a deadlock or a
  fault costs only its own numbers. What fails its check is not timed.
- % of floor counts each input and output once; the delta rule's systems are 268 MB more (1 x 16,384).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import mamba2_kernels
from benchmarks.kernel_timing import machine_facts, nominal_rates, time_graph
from benchmarks.recurrent_kernels import Cell, Heads, Problem, _error, _work
from kernels import gluon_scan
from kernels.delta_rule import gluon_systems, triton_chunks
from kernels.delta_rule import triton as delta_rule
from kernels.mamba2 import gluon_systems as mamba2_systems
from kernels.mamba2 import triton as mamba2
from kernels.precompile import Compilation, collect_kernels, settle_cache_keys
from kernels.states import StateView

CONSUMERS = {"one": 1, "two": 2}  # of others: None, the served
SIZES = [
    (1, 16384), (1, 2048), (8, 1024), (32, 512), (2, 8192), (1, 512), (8, 8192), (2, 2048), (32, 2048), (1, 65536),
]  # fmt: skip
HEADS = [
    Heads("qwen3.5-35b-a3b", 16, 32, 128, 128), Heads("qwen3.5-27b", 16, 48, 128, 128),
    Heads("qwen3.5-397b-a17b", 16, 64, 128, 128), Heads("16/16", 16, 16, 128, 128),
]  # fmt: skip
SHAPES = mamba2_kernels.SHAPES[:2]
# Variant → the names of its checks; pytest's -k
CHECKS = {
    "systems": "systems_equal", "scan": "scan_of_tritons", "hopper": "delta_rule", "mamba2": "mamba",
}  # fmt: skip
CHECK_S = 90.0  # of which most is compiling
DEVICE = torch.device("cuda")
TESTS = "tests/gpu/test_gluon_scan_cuda.py"


class Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        """Return what is called with the arguments."""
        return lambda *args, **kwargs: None


TRITONS_ADVANCE, TRITONS_SCAN = delta_rule.advance_by_chunks, mamba2.scan_rows


def start_checks() -> dict[str, subprocess.Popen[str]]:
    """Start the checks, all at once, each in its process."""
    command = [
        sys.executable, "-m", "pytest", "-o", "addopts=--strict-markers --import-mode=importlib", "-p",
        "no:cacheprovider", "-q", "-x", "--tb=short", "-W", "ignore", "-m", "gpu", TESTS, "-k",
    ]  # fmt: skip
    return {
        name: subprocess.Popen([*command, names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, names in CHECKS.items()
    }


def finish_checks(processes: dict[str, subprocess.Popen[str]], deadline_s: float) -> dict[str, str]:
    """Wait until the deadline; return the last lines of those that failed."""
    failures = {}
    for name, process in processes.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            failures[name] = "no answer in time: a deadlock, or a machine that compiles slowly"
        if process.returncode and name not in failures:
            failures[name] = output[-600:]
        print(
            f"check {name:12s} {'FAILED ' + failures[name] if name in failures else output.strip()[-60:]}", flush=True
        )
    return failures


def launch_delta(problem: Problem, variant: str, layer: int) -> torch.Tensor:
    """Run one layer; "phase" variants: without the scan."""

    def advance(*arguments: Any, config: object, **named: Any) -> None:
        gluon_systems.advance_on_hopper(*arguments, consumers=CONSUMERS.get(variant), **named)

    scans = triton_chunks._scan_kernel, gluon_scan._scan_kernel
    delta_rule.advance_by_chunks = TRITONS_ADVANCE if "before" in variant else advance
    if "phase" in variant:
        triton_chunks._scan_kernel = gluon_scan._scan_kernel = Nothing()
    try:
        return delta_rule.gated_delta_rule(
            *problem.qkv, problem.g, problem.beta, problem.views[layer][1], problem.metadata, scale=0.1, pdl=True
        )
    finally:
        delta_rule.advance_by_chunks = TRITONS_ADVANCE
        triton_chunks._scan_kernel, gluon_scan._scan_kernel = scans


def launch_mamba2(problem: mamba2_kernels.Problem, variant: str, layer: int) -> torch.Tensor:
    """Run the layer."""

    def scan(*arguments: Any, segment: object, config: object, **named: Any) -> None:
        mamba2_systems.scan_on_hopper(*arguments, **named)

    kernel = gluon_scan._scan_kernel
    if "phase" in variant:
        gluon_scan._scan_kernel = Nothing()
    chosen: Any = TRITONS_SCAN if variant == "before" else scan
    mamba2.scan_rows = chosen
    try:
        return mamba2.mamba2(*problem.tokens, problem.view, problem.metadata, pdl=True)
    finally:
        mamba2.scan_rows, gluon_scan._scan_kernel = TRITONS_SCAN, kernel


Case = tuple[Cell, Callable[[], Any], Callable[[Any, str, int], torch.Tensor], list[str]]


def cases(failures: dict[str, str]) -> Iterator[Case]:
    """Yield a cell without its configuration, its problem's maker, its launch, and the configurations to time."""
    delta = ["before", *(["hopper", "one", "two"] if "hopper" not in failures else []), "phase before"]
    if "systems" not in failures:
        delta += ["phase hopper"]
    scan = ["before", *(["hopper", "phase hopper"] if "mamba2" not in failures else [])]
    for number, (rows, tokens) in enumerate(SIZES):
        for heads in HEADS if number < 5 else HEADS[:1]:
            make = functools.partial(Problem, heads, rows=rows, tokens=tokens, device=DEVICE)
            yield Cell("delta rule", heads.name, rows, tokens), make, launch_delta, delta
        for shape in SHAPES if number < 5 else SHAPES[:1]:
            make_scan = functools.partial(mamba2_kernels.make_problem, shape, rows, tokens, DEVICE)
            yield Cell("mamba2", shape.name, rows, tokens), make_scan, launch_mamba2, scan


def view_of(problem: Any) -> StateView:
    """Return the first layer's states."""
    return problem.views[0][1] if isinstance(problem, Problem) else problem.view


def measure(case: Case) -> list[Cell]:
    """Time each configuration; its error is that of outputs and states against Triton's."""
    blank, make, launch, configs = case
    problem = make()
    kept = view_of(problem).pool.clone()
    cells, expected, states = [], None, None
    for config in configs:
        cells.append(cell := Cell(blank.kernel, blank.shape, blank.rows, blank.tokens, config))
        try:
            view_of(problem).pool.copy_(kept)
            read = launch(problem, config, 0).clone()
            if expected is None or states is None:
                expected, states = read, view_of(problem).pool.clone()
            elif "phase" not in config:
                cell.error = max(_error(read, expected), _error(view_of(problem).pool, states))
            layers = min(3, len(problem.views)) if isinstance(problem, Problem) else 1
            calls = [functools.partial(launch, problem, config, layer) for layer in range(layers)]
            cell.us = time_graph(calls, replays=5)
            num_bytes, num_flops = work_of(problem, blank)
            bytes_s, flops_s = nominal_rates()
            cell.floor_percent = 100 * max(num_bytes / bytes_s, num_flops / flops_s) * 1e6 / cell.us
        except Exception as error:  # whatever the compiler or the device says is the result
            cell.trouble = f"{type(error).__name__}: {str(error)[:200]}"
    return cells


def work_of(problem: Any, cell: Cell) -> tuple[float, float]:
    """Return the bytes that must move and the operations that must be done."""
    if isinstance(problem, Problem):
        return _work("delta rule", problem)
    shape = next(shape for shape in SHAPES if shape.name == cell.shape)
    return mamba2_kernels.work(shape, cell.rows, cell.tokens, 2)


def table(cells: list[Cell]) -> None:
    """Print a row for each configuration, a column for each size: µs, and the share of the floor of the best."""
    for kernel, shape in dict.fromkeys((cell.kernel, cell.shape) for cell in cells):
        own = [cell for cell in cells if (cell.kernel, cell.shape) == (kernel, shape)]
        sizes = list(dict.fromkeys((cell.rows, cell.tokens) for cell in own))
        print(
            f"\n{f'{kernel} {shape}':28s}" + "".join(f"{f'{rows}x{tokens}':>10s}" for rows, tokens in sizes) + "  error"
        )
        for config in dict.fromkeys(cell.config for cell in own):
            found = {(cell.rows, cell.tokens): cell for cell in own if cell.config == config}
            times = [f"{found[size].us:10.1f}" if size in found and found[size].us else f"{'-':>10s}" for size in sizes]
            print(f"{config:28s}{''.join(times)}  {max(cell.error for cell in found.values()):.1e}")
            for text in {cell.trouble for cell in found.values() if cell.trouble}:
                print("    ", text)
        whole = [cell for cell in own if "phase" not in cell.config]
        best = [max(cell.floor_percent for cell in whole if (cell.rows, cell.tokens) == size) for size in sizes]
        print(f"{'% of floor, best':28s}" + "".join(f"{share:10.1f}" for share in best))
        times_of = [{cell.config: cell.us for cell in own if (cell.rows, cell.tokens) == size} for size in sizes]
        pairs = [(by["before"], by["hopper"]) for by in times_of if by.get("before") and by.get("hopper")]
        if pairs:
            mean = math.exp(sum(math.log(before / hopper) for before, hopper in pairs) / len(pairs))
            print(f"{'before / hopper, mean':28s}{mean:10.2f}")


def main() -> None:
    """Check all, compile what passed, time it, and print the table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=130.0, help="begin no problem after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    started_s = time.monotonic()
    delta_rule.HAS_GLUON = mamba2.HAS_GLUON = False  # so "before" is Triton's, which is replaced for the others
    processes = start_checks()
    settle_cache_keys()
    torch.manual_seed(time.time_ns() % (1 << 31))
    cells: list[Cell] = []
    with torch.inference_mode():
        with collect_kernels() as kernels:
            for _, make, launch, configs in cases({}):
                problem = make()
                for config in configs:
                    launch(problem, config, 0)
                del problem
        Compilation(list(kernels)).wait(lambda done, total: None)
        print(f"# {len(kernels)} kernels, {time.monotonic() - started_s:.0f} s", flush=True)
        failures = finish_checks(processes, started_s + CHECK_S)
        for case in cases(failures):
            if time.monotonic() - started_s > options.seconds:
                print("# out of time")
                break
            cells += measure(case)
            if options.json:
                results = [asdict(cell) for cell in cells]
                report = {"machine": machine_facts(), "failures": failures, "results": results}
                options.json.write_text(json.dumps(report, indent=1))
    table(cells)


if __name__ == "__main__":
    main()
