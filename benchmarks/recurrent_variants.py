"""Checks, then times, variants of the kernels of recurrent layers' prompts for Hopper, in turns with those served.

python -m benchmarks.recurrent_variants [--json FILE]

Each part runs in a process of its own, so that a deadlock costs only its own numbers; parts take turns at timing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import mamba2_kernels
from benchmarks.kernel_timing import machine_facts, nominal_rates, time_graph
from benchmarks.recurrent_hopper import HEADS, Nothing
from benchmarks.recurrent_kernels import Problem, _work
from kernels import gluon_scan
from kernels.delta_rule import chunks, gluon_systems, gluon_warps
from kernels.delta_rule import triton as delta_rule
from kernels.mamba2 import triton as mamba2
from kernels.precompile import Compilation, collect_kernels, settle_cache_keys
from tests.gpu.test_gluon_scan_cuda import delta_problem, draw_rows, scan_problem
from tests.unit.kernels.triton_cases.mamba2_problem import error_of
from tests.unit.kernels.triton_cases.ragged import relative_error
from tests.unit.kernels.triton_cases.recurrent_problem import clone, states_after

SCAN = gluon_scan.scan_chunks
PREPARE, TRITONS = gluon_systems.prepare_systems, gluon_systems.prepare_by_triton
ADVANCE = gluon_systems.advance_on_hopper
SIZES = [(1, 16384), (1, 2048), (8, 1024), (32, 512), (2, 8192), (8, 8192), (1, 512), (32, 2048), (4, 2048)]
LIMIT_S = 62.0
DEVICE = torch.device("cuda")


@contextlib.contextmanager
def served_as(variant: str, *, is_first_phase_alone: bool = False) -> Iterator[None]:
    """Let the ops run a variant: words of lines, two, groups, behind."""
    scan = functools.partial(SCAN, behind="behind" in variant)
    gluon_systems.scan_chunks = scan
    if "lines" in variant or "two" in variant:
        prepare = gluon_warps.prepare_by_warps if "lines" in variant else gluon_warps.prepare_in_two
        gluon_systems.prepare_systems = gluon_systems.prepare_by_triton = prepare
    if "groups" in variant:
        gluon_systems.advance_on_hopper = advance_by_groups
    kernel = gluon_scan._scan_kernel
    if is_first_phase_alone:
        gluon_scan._scan_kernel = Nothing()
    try:
        yield
    finally:
        gluon_systems.scan_chunks = SCAN
        gluon_systems.advance_on_hopper = ADVANCE
        gluon_systems.prepare_systems, gluon_systems.prepare_by_triton = PREPARE, TRITONS
        gluon_scan._scan_kernel = kernel


def advance_by_groups(q, k, v, g, beta, out, view, metadata, *, scale, eps, short, pdl=False) -> None:  # noqa: ANN001
    """Make the systems of some rows, then read them, so that they stay in the L2."""
    first_row, num_rows = gluon_systems.rows_of_prompts(metadata)
    num_tokens, num_heads, d_v = v.shape
    num_bytes = num_tokens / 64 * num_heads * (4 * 64 * 64 + 16 * 64)
    num_groups = max(1, round(num_bytes / 36e6))
    group = max(1, -(-256 // (num_heads * d_v // 64)), -(-num_rows // num_groups))
    group = group if group * num_bytes < 54e6 * num_rows else num_rows
    step = (metadata.query_start_loc, metadata.seq_lens)
    for first in range(first_row, first_row + num_rows, group):
        rows = first, min(group, first_row + num_rows - first)
        most = min(num_tokens // 64 + rows[1], rows[1] * -(-metadata.max_query_len // 64))
        systems = gluon_systems.prepare_systems(
            q, k, g, beta, step, rows, most, short=short, scale=scale, eps=eps, pdl=pdl
        )
        consumers = gluon_scan.choose_consumers(rows[1] * num_heads * (d_v // 64), d_v=d_v, num_sms=132)
        gluon_systems.scan_chunks(
            q, k, v, out, systems, view, metadata, rows=rows, short=short, consumers=consumers, pdl=pdl
        )
        del systems


def run_delta(problem: Problem, layer: int) -> torch.Tensor:
    return delta_rule.gated_delta_rule(
        *problem.qkv, problem.g, problem.beta, problem.views[layer][1], problem.metadata, scale=0.1, pdl=True
    )


def check_delta(variant: str) -> float:
    """Return the largest error of outputs and states, of rows drawn anew; raises if two runs differ."""
    worst = 0.0
    for heads in [(16, 32), (16, 48)]:
        seed = random.randrange(1 << 30)
        for strongest in (2.0, 30.0):
            metadata, inputs, view = delta_problem(draw_rows(seed), heads, seed, strongest=strongest)
            other = clone(view)
            q, k, v, g, beta = inputs
            expected = chunks.gated_delta_rule(q.float(), k.float(), v.float(), g, beta, other, metadata, scale=0.1)
            states = states_after(other, metadata).double()
            first = None
            for _ in range(20):
                mine = clone(view)
                with served_as(variant):
                    out = delta_rule.gated_delta_rule(*inputs, mine, metadata, scale=0.1, pdl=True)
                pair = out, states_after(mine, metadata)
                first = first or pair
                assert torch.equal(out, first[0]), (seed, "two runs differ")
                assert torch.equal(pair[1], first[1]), (seed, "states of two runs differ")
            worst = max(worst, relative_error(out, expected.double()), relative_error(pair[1], states))
    return worst


def check_mamba2(variant: str) -> float:
    """As check_delta."""
    worst = 0.0
    for groups in (8, 1):
        seed = random.randrange(1 << 30)
        problem = scan_problem([(row.start, row.num_tokens) for row in draw_rows(seed)], groups, seed)
        with served_as(variant):
            worst = max(worst, error_of(problem, mamba2.mamba2, pdl=True))
            first, view = problem.run(mamba2.mamba2, pdl=True)
            for _ in range(20):
                out, again = problem.run(mamba2.mamba2, pdl=True)
                assert torch.equal(out, first), (seed, "two runs differ")
                assert torch.equal(again.pool.nan_to_num(), view.pool.nan_to_num()), (seed, "states differ")
    return worst


def problems(part: str) -> Iterator[tuple[str, int, int, Callable[[], Any]]]:
    for number, (rows, tokens) in enumerate(SIZES):
        if part.startswith("delta"):
            for heads in HEADS if number in (0, 1, 3) else HEADS[:1]:
                make = functools.partial(Problem, heads, rows=rows, tokens=tokens, device=DEVICE)
                yield heads.name, rows, tokens, make
        else:
            for shape in mamba2_kernels.SHAPES[:2] if number != 5 else mamba2_kernels.SHAPES[:1]:
                make = functools.partial(mamba2_kernels.make_problem, shape, rows, tokens, DEVICE)
                yield shape.name, rows, tokens, make


def time_variant(problem: Any, part: str, variant: str, *, is_first_phase_alone: bool) -> float:
    with served_as(variant, is_first_phase_alone=is_first_phase_alone):
        if part.startswith("delta"):
            layers = min(3, len(problem.views))
            return time_graph([functools.partial(run_delta, problem, layer) for layer in range(layers)], replays=5)
        run = functools.partial(mamba2.mamba2, *problem.tokens, problem.view, problem.metadata, pdl=True)
        return time_graph([run], replays=5)


def floor_us(problem: Any, shape: str, rows: int, tokens: int) -> float:
    if isinstance(problem, Problem):
        num_bytes, num_flops = _work("delta rule", problem)
    else:
        own = next(own for own in mamba2_kernels.SHAPES if own.name == shape)
        num_bytes, num_flops = mamba2_kernels.work(own, rows, tokens, 2)
    bytes_s, flops_s = nominal_rates()
    return max(num_bytes / bytes_s, num_flops / flops_s) * 1e6


def run_part(part: str, variants: list[str], lock: Path, path: Path) -> None:
    """Compile, check, then time the served kernels and the variants in turns."""
    settle_cache_keys()
    random.seed(time.time_ns())
    torch.manual_seed(time.time_ns() % (1 << 31))
    with torch.inference_mode():
        with collect_kernels() as kernels:
            for _, rows, tokens, make in problems(part):
                if (rows, tokens) not in SIZES[1:4]:
                    continue
                problem = make()
                for variant in ["served", *variants]:
                    with served_as(variant):
                        if part.startswith("delta"):
                            run_delta(problem, 0)
                        else:
                            mamba2.mamba2(*problem.tokens, problem.view, problem.metadata, pdl=True)
                del problem
        Compilation(list(kernels)).wait(lambda done, total: None)
        report: dict[str, Any] = {"errors": {}, "results": []}
        for variant in list(variants):
            try:
                report["errors"][variant] = (check_delta if part.startswith("delta") else check_mamba2)(variant)
            except Exception as error:  # the result
                report["errors"][variant] = f"{type(error).__name__}: {str(error)[:300]}"
                variants.remove(variant)
        path.write_text(json.dumps(report))
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for shape, rows, tokens, make in problems(part):
                problem = make()
                floor = floor_us(problem, shape, rows, tokens)
                row: dict[str, Any] = {
                    "kernel": part,
                    "shape": shape,
                    "rows": rows,
                    "tokens": tokens,
                    "floor_us": floor,
                    "us": {},
                }
                for variant in ["served", *variants, "served again"]:
                    row["us"][variant] = time_variant(problem, part, variant, is_first_phase_alone=False)
                if rows == 1:
                    for variant in ["served", *[one for one in variants if one in ("lines", "two")]]:
                        us = time_variant(problem, part, variant, is_first_phase_alone=True)
                        row["us"][f"first phase of {variant}"] = us
                report["results"].append(row)
                path.write_text(json.dumps(report))
                del problem
    print(f"# {part} done", flush=True)


PARTS = {"delta": ["lines", "two", "two groups", "two behind"]}


def main() -> None:
    """Start a process for each part, wait, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs=3, default=None, help="the part's name, the lock, and where its results go")
    options = parser.parse_args()
    if options.part:
        part, lock, path = options.part
        run_part(part, list(PARTS[part]), Path(lock), Path(path))
        return
    folder = Path(tempfile.mkdtemp())
    started_s = time.monotonic()
    processes = {}
    for number, part in enumerate(PARTS):
        command = [sys.executable, "-m", "benchmarks.recurrent_variants", "--part", part]
        command += [str(folder / "lock"), str(folder / f"{number}.json")]
        processes[part] = subprocess.Popen(command)
    everything: dict[str, Any] = {"machine": machine_facts(), "parts": {}}
    for number, (part, process) in enumerate(processes.items()):
        try:
            process.wait(max(1.0, LIMIT_S - (time.monotonic() - started_s)))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"# {part}: no answer in time")
        file = folder / f"{number}.json"
        report = json.loads(file.read_text()) if file.exists() else {"errors": "none", "results": []}
        everything["parts"][part] = report
        print(f"\n{part}: errors {report['errors']}; % of floor")
        for row in report["results"]:
            times = ", ".join(
                f"{name} {us:.1f}" + ("" if "phase" in name else f" ({100 * row['floor_us'] / us:.0f} %)")
                for name, us in row["us"].items()
            )
            print(f"{row['shape']:20s} {row['rows']:3d} x {row['tokens']:<6d} {times}")
        if options.json:
            options.json.write_text(json.dumps(everything, indent=1))
    print(f"# {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
