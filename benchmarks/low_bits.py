"""Checks, then times, 4-bit floats and tables in planes beside what reads tables: python -m benchmarks.low_bits.

[--parts dense experts] [--rows 1,2,4,8,16,32,64,256,512,4096] [--seconds N] [--json FILE]

dense: NVFP4 and MXFP4 layers of Llama 3.1 8B: "tables" looks codes up (kernels/linear/triton_float4.py), "served" is
the rule of kernels/linear/planes_configs.py, then candidates for it; beside them bf16, int4 in groups of 128 and NF4.
experts: NVFP4 and NF4 layers of Qwen3-30B-A3B: "rows" unpacks tiles of rows (kernels/moe/triton_storage.py), "served"
is the rule of kernels/moe/configs.py, then candidates; beside them 16 bits and AWQ.
Each candidate is first compared with its specification on inputs of its own; then a CUDA graph is timed over as many
weights, or steps that choose other experts, as do not fit the L2. The last table has a line for each layer and number
of rows, in µs. Needs a CUDA device and Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_timing import machine_facts, time_graph
from benchmarks.low_bits_cuts import Case, dense_cases, expert_cases
from benchmarks.report import Report, format_table
from kernels.precompile import Compilation, collect_kernels

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512, 4096)
PARTS: dict[str, Callable[[Sequence[int]], Iterable[list[Case]]]] = {"dense": dense_cases, "experts": expert_cases}
_COLUMNS = ("bf16", "int4", "nf4", "before", "served", "best")


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the chosen parts; print each figure as it comes and the table last, write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no number of rows after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.low_bits needs a CUDA device.")
    torch.manual_seed(0)
    end_s = time.monotonic() + options.seconds
    rows = [int(each) for each in options.rows.split(",")]
    results: list[Report] = []
    for cases in (cases for part in options.parts for cases in PARTS[part](rows)):
        if time.monotonic() > end_s:
            print(f"# stopped after {options.seconds:.0f} s before {cases[0].kind} {cases[0].layer}")
            break
        _compile(cases)
        print(f"# compiled {cases[0].kind} {cases[0].layer}, {end_s - time.monotonic():.0f} s left", flush=True)
        for case in cases:
            if time.monotonic() > end_s:
                print(f"# stopped after {options.seconds:.0f} s before {case.kind} {case.layer} {case.num_rows}")
                break
            results.append(_measure(case))
            if options.json:
                options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1))
        torch.cuda.empty_cache()
    print(make_table(results))


def _compile(cases: Sequence[Case]) -> None:
    """Compile what all candidates launch, in parallel."""
    with collect_kernels() as kernels:
        for case in cases:
            for calls in case.cuts.values():
                calls[0]()
    Compilation(list(kernels)).wait(lambda done, total: None)


def _measure(case: Case) -> Report:
    """Return the times of a case's cuts in µs, by name, and the failures."""
    times: dict[str, float] = {}
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, calls in case.cuts.items():
        try:
            out = calls[0]()
            assert torch.equal(out, calls[0]()), "two runs differ"
            error = case.error_of(name, out)
            if error is not None:
                errors[name] = error
                assert error <= case.tolerance, f"error {error:.2e}"
            times[name] = round(time_graph(calls, replays=9), 2)
        except (AssertionError, RuntimeError, ValueError) as failure:  # wrong, or does not fit: a result, too
            failures[name] = f"{type(failure).__name__}: {str(failure)[:200]}"
    fields: dict[str, Any] = {"kind": case.kind, "layer": case.layer, "rows": case.num_rows}
    own = {name: us for name, us in times.items() if name not in case.others}
    best = min(own, key=lambda name: own[name], default="")
    for name, us in times.items():
        print(
            case.kind, case.layer, case.num_rows, name, f"{us:.2f} us", f"error {errors.get(name, 0):.1e}", flush=True
        )
    for name, text in failures.items():
        print(case.kind, case.layer, case.num_rows, name, "FAILED", text, flush=True)
    return fields | {
        "floor_us": round(case.num_bytes / 3.0e6, 2), "times_us": times, "errors": errors, "failures": failures,
        "best": best,
    }  # fmt: skip


def make_table(results: Sequence[Report]) -> str:
    """Return a line for each kind, layer and number of rows. floor: of reading the weights at 3.0 TB/s."""
    rows = [["kind", "layer", "rows", "floor", *_COLUMNS, "the best"]]
    for result in results:
        times: dict[str, float] = {**result["times_us"]}
        times["before"] = times.get("tables", times.get("rows", float("nan")))
        times["best"] = times.get(str(result["best"]), float("nan"))
        figures = ["" if name not in times else f"{times[name]:.1f}" for name in _COLUMNS]
        head = [str(result[name]) for name in ("kind", "layer", "rows")]
        rows.append([*head, f"{result['floor_us']:.1f}", *figures, str(result["best"])])
    return format_table(rows)


if __name__ == "__main__":
    main()
