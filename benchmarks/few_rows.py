"""Checks, then times, fused kernels of decode steps of few rows, old beside new: python -m benchmarks.few_rows.

[--parts check chains products] [--seconds N] [--json FILE]

check: each fused kernel against its specification in float64, on inputs of its own. products: one product behind a
norm, by each candidate config. chains: decode layers of models in one CUDA graph with early launches and weights that
L2 does not have; µs a layer, each fusion switched on alone and all together. The fastest of two rounds is given.
Needs a Hopper GPU and Triton.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from triton.errors import TritonError

from benchmarks.few_rows_layers import Chain, Fusions, Shape, make_experts
from benchmarks.kernel_timing import BF16_CUDA, machine_facts, num_copies, time_graph
from benchmarks.moe_problem import SHAPES as EXPERTS
from kernels.elementwise import reference as elementwise
from kernels.elementwise.triton import add_rms_norm, silu_and_mul
from kernels.linear.late_norm import GateKind, LateNorm
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_gemv import GemvConfig, allocate_scratch, gated_gemv, gemv
from kernels.linear.triton_rounded import add_rms_norm_rounded
from kernels.linear.triton_row import RowConfig, normed_gemv, row_gemv
from kernels.moe.reference import ExpertSum
from kernels.moe.triton_sums import sum_experts, sum_experts_add_rms_norm
from kernels.precompile import Compilation, collect_kernels

if TYPE_CHECKING:  # of a module that needs more than this one does
    from benchmarks.report import Report

SHAPES = (
    Shape("0.6B", 14, 1024, 16, 8, 128, 3072, has_head_norms=True),
    Shape("1.7B", 8, 2048, 16, 8, 128, 6144, has_head_norms=True),
    Shape("8B", 6, 4096, 32, 8, 128, 14336),
    Shape("30B-A3B fp8", 8, 2048, 32, 4, 128, 0, EXPERTS["qwen3-30b-a3b-fp8"], has_head_norms=True, is_fp8=True),
    Shape("gpt-oss-20b", 8, 2880, 64, 8, 64, 0, EXPERTS["gpt-oss-20b-mxfp4"], has_biases=True),
)
ROWS = (1, 2, 4, 8, 16)
_GATES: tuple[GateKind, ...] = ("", "silu", "gelu_tanh")
# K is no multiple of 512: gpt-oss's QKV, router and head, Qwen2.5 1.5B's down, Llama 2 7B's, QKV of 0.5B and SmolLM2
RAGGED = ((5120, 2880), (32, 2880), (201088, 2880), (1536, 8960), (4096, 11008), (1152, 896), (960, 576))
ROW_PRODUCTS = ((4096, 1024), (6144, 1024), (4096, 2048), (12288, 2048), (128, 2048), (32, 2880), (5120, 2880))
PLAIN_PRODUCTS = ((1024, 2048), (1024, 3072), (2048, 2048), (4096, 4096))
# Of the experts' products: (outputs, warps, stages)
TILES = (((64, 4, 3), (64, 4, 3)), ((64, 4, 6), (64, 4, 6)), ((64, 4, 6), (128, 4, 4)))
ROW_CONFIGS = ((2, 4), (4, 4), (8, 4), (16, 8), (4, 8))


def main() -> None:
    """Run the parts; print a table of each, write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"check": check, "chains": time_chains, "products": time_products}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--seconds", type=float, default=125.0, help="begin no case after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.few_rows needs a CUDA device.")
    torch.manual_seed(0)
    end_s = time.monotonic() + options.seconds
    results: list[Report] = []
    tables = []
    for name in options.parts:
        began_s, found = time.monotonic(), []
        for result in parts[name](end_s):
            found.append({"part": name} | result)
            if options.json:
                everything = {"machine": machine_facts(), "results": results + found}
                options.json.write_text(json.dumps(everything, indent=1) + "\n")
        results += found
        print(f"# {name}: {len(found)} results in {time.monotonic() - began_s:.0f} s", flush=True)
        tables.append(_table(name, found))
    print("\n\n".join(tables))


def check(_: float) -> Iterator[Report]:
    """Yield the error of each fused kernel, beside that of the kernels it replaces, both against float64."""
    cases = list(_checks())
    _compile([run for _, (fused, parts, _) in cases for run in (fused, parts)])
    for case, (fused, parts, exact) in cases:
        errors, expected = [], exact()
        for run in (fused, parts):
            outs, again = run(), run()
            if not all(torch.equal(a, b) for a, b in zip(outs, again, strict=True)):
                print(f"WRONG {case}: two runs differ", flush=True)
            errors.append(max(_relative(out, each) for out, each in zip(outs, expected, strict=True)))
        is_equal = all(torch.equal(a, b) for a, b in zip(fused(), parts(), strict=True))
        yield {"case": case, "error": errors[0], "error_of_parts": errors[1], "is_equal": is_equal}
        if not errors[0] <= max(1.2 * errors[1], 1e-3):
            print(f"WRONG {case}: error {errors[0]:.2e}, of the parts {errors[1]:.2e}", flush=True)


def _checks() -> Iterator[tuple[str, tuple[Callable, Callable, Callable]]]:
    scratch = allocate_scratch(BF16_CUDA["device"])
    for n, k in ((4096, 1024), (6144, 1024), (12288, 2048), (5120, 2880), (32, 2880), (1154, 320)):
        for gate in _GATES:
            yield f"normed {n} x {k} {gate}", _normed_check(n, k, gate)
        x, w, bias = _randn(1, k), _randn(n, k) * k**-0.5, _randn(n)
        yield (
            f"row {n} x {k}",
            (
                functools.partial(_listed, row_gemv, x, w, bias, pdl=True),
                functools.partial(_listed, functional.linear, x, w, bias),
                functools.partial(_linear64, x, w, bias),
            ),
        )
    for (n, k), rows in [(size, rows) for size in RAGGED if size[0] < 10_000 for rows in (1, 3, 16, 33)]:
        x, w, bias = _randn(rows, k), _randn(n, k) * k**-0.5, _randn(n)
        yield (
            f"ragged {n} x {k}, {rows} rows",
            (
                functools.partial(_listed, gemv, x, w, bias, scratch, pdl=True),
                functools.partial(_listed, functional.linear, x, w, bias),
                functools.partial(_linear64, x, w, bias),
            ),
        )
    for (n, k), rows in [(size, rows) for size in ((6144, 1024), (28672, 4096), (9728, 896)) for rows in (1, 3, 16)]:
        x, w = _randn(rows, k), _randn(n, k) * k**-0.5
        yield (
            f"gated {n} x {k}, {rows} rows",
            (
                functools.partial(_listed, gated_gemv, x, w, scratch, is_gelu=False, pdl=True),
                functools.partial(lambda x, w: [silu_and_mul(gemv(x, w, None, scratch, pdl=True), pdl=True)], x, w),
                functools.partial(lambda x, w: [elementwise.silu_and_mul(*_linear64(x, w, None))], x, w),
            ),
        )
    for rows, top_k, size, rounding in ((1, 8, 2048, Rounding(128)), (16, 8, 2048, Rounding(128)), (7, 4, 2880, None)):
        yield f"sum of {top_k} and norm of {size}, {rows} rows", _sum_check(rows, top_k, size, rounding)


def _normed_check(n: int, k: int, gate: GateKind) -> tuple[Callable, Callable, Callable]:
    x, residual, weight, w = _randn(1, k), _randn(1, k), _randn(k), _randn(n, k) * k**-0.5
    bias = None if gate else _randn(n)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    activate = {"": None, "silu": elementwise.silu_and_mul, "gelu_tanh": elementwise.gelu_tanh_and_mul}[gate]

    def fused() -> list[torch.Tensor]:
        late = LateNorm(x, residual, weight, 1e-6, total)
        out = normed_gemv(late, w, bias, gate=gate, normed=normed, pdl=True)
        return [out, normed.clone(), total.clone()]

    def parts() -> list[torch.Tensor]:
        normed, total = add_rms_norm(x, residual, weight, 1e-6, pdl=True)
        out = functional.linear(normed, w, bias)
        return [activate(out) if activate else out, normed, total]

    def exact() -> list[torch.Tensor]:
        normed, total = elementwise.add_rms_norm(x, residual, weight, 1e-6)
        (out,) = _linear64(normed, w, bias)
        return [activate(out) if activate else out, normed.double(), total.double()]

    return fused, parts, exact


def _sum_check(rows: int, top_k: int, size: int, rounding: Rounding | None) -> tuple[Callable, Callable, Callable]:
    outputs, residual, weight = _randn(rows * top_k, size), _randn(rows, size), _randn(size)
    none = torch.zeros(rows, top_k, dtype=torch.int32, device=BF16_CUDA["device"])
    late = ExpertSum(outputs, torch.rand(rows, top_k, **BF16_CUDA), none, has_absent=False)

    def fused() -> list[torch.Tensor]:
        return _flat(sum_experts_add_rms_norm(late, residual, weight, 1e-6, rounding, pdl=True))

    def parts() -> list[torch.Tensor]:
        mixed = sum_experts(late, pdl=True)
        if rounding is None:
            return _flat(add_rms_norm(mixed, residual, weight, 1e-6, pdl=True))
        return _flat(add_rms_norm_rounded(mixed, residual, weight, 1e-6, rounding, pdl=True))

    return fused, parts, parts


def _flat(results: tuple[torch.Tensor | RoundedRows, torch.Tensor]) -> list[torch.Tensor]:
    normed, total = results
    return [normed, total] if isinstance(normed, torch.Tensor) else [normed.values.float(), normed.scales, total]


def time_products(end_s: float) -> Iterator[Report]:
    """Yield µs of a norm and a product behind it for each config, and of the two kernels that serve now."""
    cases = [("ragged", size, rows) for size in RAGGED for rows in (1, 2, 8, 16, 64)]
    cases += [("normed", size, 1) for size in ROW_PRODUCTS] + [("plain row", size, 1) for size in PLAIN_PRODUCTS]
    scratch = allocate_scratch(BF16_CUDA["device"])
    if time.monotonic() > end_s - 30:
        print("# out of time: products are missing")
        return
    _compile([calls[0] for case in cases for calls in _candidates(*case, scratch, copies=1).values()])
    for kind, (n, k), rows in cases:
        if time.monotonic() > end_s:
            print("# out of time: products are missing")
            return
        candidates = _candidates(kind, (n, k), rows, scratch, copies=num_copies(2 * n * k))
        times = {name: _time(name, calls, replays=9) for name, calls in candidates.items()}
        yield {"case": f"{kind} {n} x {k}", "rows": rows, "us": times, "floor_us": 2 * n * k / 3.35e6}


def _candidates(
    kind: str, size: tuple[int, int], rows: int, scratch: SplitKScratch, *, copies: int
) -> dict[str, list[Callable[[], object]]]:
    n, k = size
    weights = [_randn(n, k) * k**-0.5 for _ in range(copies)]
    x, residual, norm, bias = _randn(rows, k), _randn(rows, k), _randn(k), _randn(n)
    gated = n in (6144, 12288)

    def behind_norm(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[Callable[[], object]]:
        def call(w: torch.Tensor) -> None:
            out = product(add_rms_norm(x, residual, norm, 1e-6, pdl=True)[0], w)
            if kind == "normed" and gated:
                silu_and_mul(out, pdl=True)

        return [functools.partial(call, w) for w in weights]

    if kind == "ragged":
        found = {"cublas": behind_norm(lambda x, w: functional.linear(x, w, bias))}
        for name, config in _ragged_configs(rows, n, k).items():
            found[name] = behind_norm(functools.partial(_by_gemv, bias=bias, scratch=scratch, config=config))
        return found
    found = {"served": behind_norm(functools.partial(_by_gemv, bias=None, scratch=scratch, config=None))}
    late = LateNorm(x, residual, norm, 1e-6, torch.empty_like(x))
    gate: GateKind = "silu" if gated else ""
    for block_n, num_warps in ROW_CONFIGS:
        row = RowConfig(block_n, num_warps)
        name = f"{block_n}, {num_warps} warps"
        if kind == "plain row":
            found[name] = behind_norm(functools.partial(row_gemv, bias=None, config=row, pdl=True))
            continue
        found[name] = [functools.partial(normed_gemv, late, w, None, gate=gate, config=row, pdl=True) for w in weights]
    return found


def _ragged_configs(rows: int, n: int, k: int) -> dict[str, GemvConfig | None]:
    configs: dict[str, GemvConfig | None] = {"served": None}
    splits = 4 if k >= 2048 and n < 2048 else 1
    if rows == 1:
        tiles = [(4, 512, 1, 4, 6), (8, 512, 1, 4, 6), (4, 1024, 1, 4, 3), (4, 512, splits, 4, 2)]
    else:
        tiles = [(16, 256, 1, 4, 4), (32, 256, 1, 4, 4), (64, 128, 1, 4, 6), (16, 256, splits, 4, 3),
                 (32, 128, splits, 4, 4), (64, 64, 1, 4, 8)]  # fmt: skip
    for block_n, block_k, parts, warps, stages in tiles:
        name = f"{block_n} x {block_k}, {parts} splits, {stages} stages"
        configs[name] = GemvConfig(
            block_n, block_k, parts, warps, stages, uses_dot=rows > 1, prefetch=512 if rows == 1 else 256
        )  # fmt: skip
    return configs


def _by_gemv(
    x: torch.Tensor, w: torch.Tensor, *, bias: torch.Tensor | None, scratch: SplitKScratch, config: GemvConfig | None
) -> torch.Tensor:
    return gemv(x, w, bias, scratch, config=config, pdl=True)


def time_chains(end_s: float) -> Iterator[Report]:
    """Yield µs a layer of each shape and number of rows, with the fusions that it may have."""
    for shape in SHAPES:
        if time.monotonic() > end_s - 5:
            print(f"# out of time: {shape.name} and what follows is missing")
            return
        chain = Chain(shape, make_experts(shape, 4))
        variants = {rows: _variants(shape, rows) for rows in ROWS}
        with collect_kernels() as kernels:
            for rows, named in variants.items():
                chain.set_rows(rows)
                for fused in named.values():
                    chain.run(fused)
        Compilation(list(kernels)).wait(lambda done, total: None)
        for rows, named in variants.items():
            chain.set_rows(rows)
            expected = chain.run(Fusions()).double()
            times: dict[str, float] = {}
            errors = {}
            for name, fused in list(named.items()):
                try:
                    errors[name] = _relative(chain.run(fused), expected)
                except (AssertionError, RuntimeError, TritonError) as error:  # of tiles that do not fit
                    print(f"FAILED {shape.name}, {rows} rows, {name}: {str(error)[:200]}", flush=True)
                    del named[name]
            for _ in range(2):
                for name, fused in named.items():
                    us = _time(name, [functools.partial(chain.run, fused)], replays=11) / shape.num_layers
                    times[name] = min(us, times.get(name, us))
            yield {"case": shape.name, "rows": rows, "us": times, "errors": errors}
        del chain
        torch.cuda.empty_cache()


def _variants(shape: Shape, rows: int) -> dict[str, Fusions]:
    named = {"before": Fusions()}
    if shape.experts is None:
        named["gates"] = Fusions(gates=True)
        if rows == 1 and shape.hidden <= 4096:
            named |= {"norms": Fusions(gates=True, norms=True), "norms, rows": Fusions(True, norms=True, rows=True)}
        return named
    lines = shape.hidden % 512 != 0
    if lines:
        named["lines"] = Fusions(lines=True)
    named["sums"] = Fusions(sums=True)
    for up, down in TILES:
        named[f"up {up}, down {down}"] = Fusions(up=up, down=down)
    if rows == 1:
        named["norms"] = Fusions(lines=lines, norms=True)
    return named | {"all": Fusions(lines=lines, sums=True, norms=rows == 1)}


def _time(name: str, calls: Sequence[Callable[[], object]], *, replays: int) -> float:
    """Return the µs of a call, infinity if its tiles do not fit."""
    try:
        return time_graph(calls, replays=replays)
    except (RuntimeError, TritonError) as error:
        print(f"FAILED {name}: {str(error)[:200]}", flush=True)
        return float("inf")


def _compile(runs: Sequence[Callable[[], object]]) -> None:
    with collect_kernels() as kernels:
        for run in runs:
            run()
    if kernels:
        Compilation(list(kernels)).wait(lambda done, total: None)


def _table(name: str, results: Sequence[Report]) -> str:
    if name == "check":
        wrong = [result["case"] for result in results if result["error"] > max(1.2 * result["error_of_parts"], 1e-3)]
        equal = sum(result["is_equal"] for result in results)
        return f"check: {len(results)} cases, {equal} equal to the parts bit for bit, wrong: {wrong or 'none'}"
    lines = [f"{name}, us: the first is what stood before, the others by time"]
    for result in results:
        times = dict(result["us"])
        first = next(iter(times))
        others = sorted((us, each) for each, us in times.items() if each != first)
        cells = [f"{first} {times[first]:.2f}", *(f"{each} {us:.2f}" for us, each in others)]
        if errors := result.get("errors"):
            cells.append(f"errors up to {max(errors.values()):.1e}")
        lines.append(f"{result['case']:20} {result['rows']:3} | " + " | ".join(cells))
    return "\n".join(lines)


def _listed(function: Callable[..., torch.Tensor], *args: object, **options: object) -> list[torch.Tensor]:
    return [function(*args, **options)]


def _linear64(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> list[torch.Tensor]:
    return [functional.linear(x.double(), w.double(), None if bias is None else bias.double())]


def _relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, **BF16_CUDA)


if __name__ == "__main__":
    main()
