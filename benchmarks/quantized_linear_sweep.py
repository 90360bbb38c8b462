"""Times products of quantised layers of Llama 3.1 8B with every candidate of tile sizes, checking each result first.

    python -m benchmarks.quantized_linear_sweep --out sweep.json                       all kinds, shapes and rows
    python -m benchmarks.quantized_linear_sweep --kinds mxfp4 nvfp4 --rows 1 8 64      some of them
    python -m benchmarks.quantized_linear_sweep --kinds w8a8 fp8 fp8-blocks --rows 1 8 16 32 64     few rows of 8 bits

A row of the table has µs of bf16 by cuBLAS, of the product as served, and of the best candidate, all with the rounding
of activations where there is one. "dense" dequantises the matrix for cuBLAS. Candidates that do not fit the device, or
give wrong results, are named and left out. The configs are in kernels/linear/lut4_configs.py, scaled8_configs.py and
few_rows_configs.py. Products of few rows begin beside the rounding before them, as they are served.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.kernel_timing import machine_facts, num_copies, precompile, time_calls, time_graph
from benchmarks.quantized_linear_kinds import KINDS, Config, Kind, constant_of
from benchmarks.report import Report, format_table

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # N, K
ROWS = (1, 8, 64, 256, 4096)
_SMOKE_SHAPES = {"tiny": (96, 256)}
_SMOKE_ROWS = (1, 9)
_SMOKE_CANDIDATES = 3
_COMPILED = (1024, 2048)  # N, K: only whether they are multiples of 512 matters to most kernels' compilers
_MAX_ERROR = 6e-3  # of results rounded to bf16, with sums of e4m3 of about 14 bits
_REPLAYS = 9


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep, print the best of each case beside the served product, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--sizes", nargs="+", metavar="NxK", default=[], help="outputs x inputs, instead of --shapes")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, interpreted: no figures")
    parser.add_argument("--out", type=Path, help="where to write all numbers")
    options = parser.parse_args(arguments)
    shapes = _SMOKE_SHAPES if options.smoke else {name: SHAPES[name] for name in options.shapes}
    if options.sizes:
        shapes = {size: (int(size.split("x")[0]), int(size.split("x")[1])) for size in options.sizes}
    rows = _SMOKE_ROWS if options.smoke else tuple(options.rows)
    kinds = [KINDS[name] for name in options.kinds]
    if not options.smoke:
        _compile(kinds, shapes, rows)
        if not torch.cuda.is_available():
            sys.exit("benchmarks.quantized_linear_sweep needs a CUDA device, or --smoke.")
    torch.manual_seed(0)
    results: list[Report] = []
    for kind in kinds:
        for name, (n, k) in shapes.items():
            results += _time_shape(kind, name, n, k, rows, is_smoke=options.smoke)
            if options.out:  # after each shape: what was measured is kept if the machine goes
                options.out.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
    columns = ("kind", "shape", "rows", "bf16_us", "served_us", "best_us", "tb_s", "tflop_s", "best")
    print(format_table([list(columns), *([str(result[column]) for column in columns] for result in results)]))


def _compile(kinds: Sequence[Kind], shapes: dict[str, tuple[int, int]], rows: Sequence[int]) -> None:
    """Fill Triton's cache with every candidate, in parallel processes."""
    jobs: dict[tuple[str, Config, int | None], Callable[[], object]] = {}
    for kind in kinds:
        for num_rows in rows:
            for n, k in shapes.values():
                for config in kind.candidates(num_rows, n, k):
                    constant = constant_of(config, num_rows=num_rows, k=k)
                    compiled_k = k if constant == k else _COMPILED[1]
                    job = functools.partial(_run_once, kind, num_rows, compiled_k, config)
                    jobs.setdefault((kind.name, config, constant), job)
    errors = precompile(list(jobs.values()))
    print(f"{len(jobs)} candidates compiled, of which {len(errors)} do not fit", flush=True)


def _run_once(kind: Kind, num_rows: int, k: int, config: Config) -> None:
    """Compile one config into Triton's cache."""
    device = torch.device("cuda")
    x = torch.zeros(num_rows, k, dtype=torch.bfloat16, device=device)
    kind.run(x, kind.make(_COMPILED[0], k, x.dtype, device), config, kind.scratch(device))


def _time_shape(kind: Kind, name: str, n: int, k: int, rows: Sequence[int], *, is_smoke: bool) -> list[Report]:
    device = torch.device("cpu" if is_smoke else "cuda")
    dtype = torch.float16 if is_smoke else torch.bfloat16  # the interpreter has no bf16
    weights = [kind.make(n, k, dtype, device) for _ in range(1 if is_smoke else num_copies(kind.num_bytes(n, k)))]
    dense = [torch.randn(n, k, device=device).to(dtype) for _ in range(1 if is_smoke else num_copies(2 * n * k))]
    clock = _on_host if is_smoke else functools.partial(time_graph, replays=_REPLAYS)
    results = []
    for num_rows in rows:
        x = torch.randn(num_rows, k, device=device).to(dtype)
        if is_smoke:  # numbers of e4m3, as the interpreter rounds others in its own way
            x = x.mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).to(dtype)
            x[:, ::32] = 448
        expected = kind.exact(x, weights[0])
        scratch, served = kind.scratch(device), kind.served()
        cuts: list[Report] = []
        case = f"{kind.name} {name} {num_rows}"
        candidates = kind.candidates(num_rows, n, k, is_interpreted=is_smoke)
        for config in candidates[:_SMOKE_CANDIDATES] if is_smoke else candidates:
            run = functools.partial(kind.run, x, config=config, scratch=scratch)
            us = _time(f"{case} {config}", run, weights, expected, clock)
            if us is not None:
                cuts.append({"config": "dense" if config is None else asdict(config), "us": us})
        served_us = _time(
            f"{kind.name} {name} {num_rows} served", functools.partial(served, x), weights, expected, clock
        )
        bf16_us = round(clock([functools.partial(functional.linear, x, w) for w in dense]), 2)
        results.append(_summary(kind, name, n, k, num_rows, cuts) | {"served_us": served_us, "bf16_us": bf16_us})
        print(*results[-1].values() if is_smoke else (kind.name, name, num_rows, "done"), flush=True)
    return results


def _time(
    what: str,
    run: Callable[..., torch.Tensor],
    weights: Sequence[object],
    expected: torch.Tensor,
    clock: Callable[[Sequence[Callable[[], object]]], float],
) -> float | None:
    """Return µs of a product; None if it does not fit the device or is wrong."""
    try:
        error = float((run(weights[0]).double() - expected).norm() / expected.norm())
        if not error < _MAX_ERROR:
            print("wrong", what, f"relative error {error:.2e}", flush=True)
            return None
        return round(clock([functools.partial(run, weight) for weight in weights]), 2)
    except Exception as failure:  # this config does not fit the device
        print("skipped", what, type(failure).__name__, str(failure)[:100], flush=True)
        return None


def _summary(kind: Kind, name: str, n: int, k: int, num_rows: int, cuts: list[Report]) -> Report:
    best = min(cuts, key=lambda cut: float(cut["us"]), default=None)
    found: Report = {"kind": kind.name, "shape": name, "n": n, "k": k, "rows": num_rows, "cuts": cuts}
    if best is None:
        return found | {"best_us": None, "tb_s": None, "tflop_s": None, "best": ""}
    us, config = float(best["us"]), best["config"]
    words = config if isinstance(config, str) else " ".join(f"{key}={value}" for key, value in config.items())
    return found | {
        "best_us": us,
        "tb_s": round(kind.num_bytes(n, k) / us * 1e-6, 2),
        "tflop_s": round(2 * num_rows * n * k / us * 1e-6, 1),
        "best": words,
    }


def _on_host(calls: Sequence[Callable[[], object]]) -> float:
    return time_calls(calls, is_capturable=False, device=torch.device("cpu"))[0]


if __name__ == "__main__":
    main()
