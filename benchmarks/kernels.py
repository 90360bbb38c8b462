"""Checks, then times, the Triton kernels: python -m benchmarks.kernels [--only decode,gemv] [--sweep] [--json FILE].

Prints a short table and writes all figures and the machine's facts as JSON to --json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks import kernels_attention, kernels_int, kernels_layers, kernels_linear, kernels_lora
from benchmarks.kernel_timing import machine_facts, precompile
from benchmarks.report import Report

PARTS = ("elementwise", "decode", "prefill", "gemv", "int4", "layers", "lora")


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--sweep", action="store_true", help="time every candidate configuration, to retune")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    parts = options.only.split(",")
    jobs = []
    if {"decode", "prefill"} & set(parts):
        jobs += kernels_attention.compile_jobs(sweep=options.sweep)
    if "gemv" in parts:
        jobs += kernels_linear.compile_jobs(sweep=options.sweep)
    if "int4" in parts:
        jobs += kernels_int.compile_jobs(sweep=options.sweep)
    for error in precompile(jobs):
        print(error, flush=True)
    results = []
    for part in parts:
        results += _run(part, sweep=options.sweep)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1))
    _print_table(results)


def _run(part: str, *, sweep: bool) -> list[dict[str, object]]:
    torch.manual_seed(0)
    if part == "elementwise":
        return kernels_linear.bench_elementwise()
    if part == "layers":
        return kernels_layers.bench_layers()
    if part == "int4":
        return kernels_int.bench_int(sweep=sweep)
    if part == "gemv":
        return kernels_linear.bench_gemv(sweep=sweep)
    if part == "lora":
        return kernels_lora.bench_lora()
    return {"decode": kernels_attention.bench_decode, "prefill": kernels_attention.bench_prefill}[part](sweep=sweep)


def _print_table(results: list[Report]) -> None:
    """Print one line per case: the chosen configuration, the one it is compared with, and the best of the sweep."""
    cases: dict[tuple[str, str], list[Report]] = {}
    for result in results:
        cases.setdefault((result["kind"], result["case"]), []).append(result)
    for (kind, case), rows in cases.items():
        first, best = rows[0], min(rows, key=lambda row: row["us"])
        line = f"{kind[:4]} {case:28s} {first['us']:8.2f}us"
        for unit in ("tb_s", "tflop_s"):
            line += f" {first[unit]:6.2f}{unit}" if unit in first else ""
        for other in ("torch_us", "triton_us", "sdpa_us", "cublas_us"):
            line += f" {other[:-3]} {first[other]:.2f}" if other in first else ""
        line += "".join(f" nopdl {row['us']:.2f}" for row in rows if row.get("pdl") is False)
        if best is not first and best.get("config"):
            config = "".join(c if c.isdigit() else " " for c in str(best["config"])).split()
            line += f" | {best['us']:.2f} {'-'.join(config)} s{best.get('splits', '')}"
            line += "" if best.get("pdl", True) else " nopdl"
        print(line)


if __name__ == "__main__":
    main()
