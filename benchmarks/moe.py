"""Checks, then times, the mixture of experts: python -m benchmarks.moe [--tokens 1,64] [--sweep] [--json FILE].

Each time is shown beside torch's implementations and the lower bound of the device's memory or tensor cores. --sweep
times every config worth adding to kernels/moe/configs.py and prints the best; of experts that are served in planes,
those of planes and those of the row kernels. Prints a table; writes JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.kernel_timing import BF16_CUDA, machine_facts, nominal_rates, precompile, time_calls, time_graph
from benchmarks.moe_problem import (
    SHAPES,
    MoeInputs,
    MoeShape,
    MoeWeights,
    count_hit,
    exact,
    floor_us,
    make_inputs,
    make_weights,
    specification,
    torch_grouped,
)
from benchmarks.report import Report, format_table
from kernels.moe.configs import (
    PlanesPairsConfig,
    grouped_config,
    hopper_fp8_config,
    hopper_planes_config,
    planes_config,
    uses_pairs,
)
from kernels.moe.planes import PlanesMatrix

TOKENS = (1, 8, 64, 256, 1024, 8192)
NUM_STEPS = 8  # sets of inputs in turn, each choosing other experts
MAX_ERROR = 1.3  # times torch's own error, for the same tensors in fp32
Result = Report


def main() -> None:
    """Run the chosen shapes and numbers of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma-separated")
    parser.add_argument("--sweep", action="store_true", help="time every candidate cut, to retune")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if options.sweep:
        from benchmarks.moe_sweep import compile_jobs  # here, since it needs triton

        for error in precompile(compile_jobs(options.shapes)):
            print(error, flush=True)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.moe needs a CUDA device.")
    torch.manual_seed(0)
    results: list[Result] = []
    for name in options.shapes:
        weights = make_weights(SHAPES[name], **BF16_CUDA)
        for num_tokens in map(int, options.tokens.split(",")):
            results.append(bench(name, weights, num_tokens, options))
            if options.json:
                options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1))
        del weights
        torch.cuda.empty_cache()
    print(make_table(results))


def bench(name: str, weights: MoeWeights, num_tokens: int, options: argparse.Namespace) -> Result:
    """Check one number of tokens, then time it. Raises AssertionError if a result is wrong."""
    from kernels.moe.triton import fused_moe

    shape = SHAPES[name]
    steps = [make_inputs(shape, num_tokens, **BF16_CUDA) for _ in range(NUM_STEPS)]

    def run(step: MoeInputs) -> torch.Tensor:
        out = fused_moe(
            step.x, step.logits, weights.gate_up, weights.down,
            top_k=shape.top_k, renormalize=True, round_weights=shape.round_weights, pdl=True,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    errors = check(shape, weights, steps[0], run)
    num_hit = sum(count_hit(shape, step) for step in steps) / NUM_STEPS
    bytes_s, flops_s = nominal_rates()
    least_us, bound = floor_us(shape, num_tokens, num_hit, bytes_s=bytes_s, flops_s=flops_s)
    us = time_graph(_calls(run, steps))
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    cut = describe_cut(shape, num_tokens, planes=_planes(weights), is_hopper=is_hopper)
    result: Result = {
        "shape": name, "tokens": num_tokens, "experts_hit": num_hit, "us": us, "floor_us": least_us, "bound": bound,
        "of_floor": least_us / us, "config": cut, **errors,
    }  # fmt: skip
    ways = [("torch_us", specification, False), ("torch_grouped_us", torch_grouped, True)]
    for way, function, is_capturable in ways if shape.storage == "dense" else ways[:1]:
        calls = _calls(functools.partial(function, shape, weights), steps)
        result[way] = time_calls(calls, is_capturable=is_capturable, device=BF16_CUDA["device"])[0]
    if options.sweep:
        result["sweep"] = _sweep(name, weights, steps)
        print_best(name, num_tokens, result["sweep"])
    print(name, num_tokens, f"{us:.1f} us", flush=True)
    return result


def check(
    shape: MoeShape, weights: MoeWeights, step: MoeInputs, run: Callable[[MoeInputs], torch.Tensor]
) -> dict[str, float]:
    """Assert that two runs are equal and as close to fp32 as torch is; return both errors."""
    expected, out = exact(shape, weights, step), run(step)
    assert torch.equal(out, run(step)), "two runs differ"
    errors = [
        float((result.float() - expected).norm() / expected.norm())
        for result in (out, specification(shape, weights, step))
    ]
    assert errors[0] <= MAX_ERROR * errors[1], errors
    return {"error": errors[0], "torch_error": errors[1]}


def describe_cut(shape: MoeShape, num_tokens: int, *, planes: str | None, is_hopper: bool = False) -> str:
    """Return the config that serving uses for so many tokens. planes: their kind; None: the experts are in none."""
    sizes = {"num_tokens": num_tokens, "top_k": shape.top_k, "num_experts": shape.num_experts}
    pairs = {"num_pairs": num_tokens * shape.top_k, "num_experts": shape.num_experts}
    if is_hopper and planes == "fp8" and (hopper := hopper_fp8_config(**pairs)) is not None:
        return f"Hopper, {hopper.block_m} rows"
    if is_hopper and planes is not None and (packed := hopper_planes_config(planes, **pairs)) is not None:
        return f"Hopper, {packed.block_m} rows"
    if planes is not None:
        config = planes_config(planes, can_round=True, **sizes)
        return "planes, pairs" if isinstance(config, PlanesPairsConfig) else f"planes, {config.block_m} rows"
    if uses_pairs(**sizes):
        return "pairs"
    return f"{grouped_config(**pairs, itemsize=2).block_m} rows"


def print_best(name: str, num_tokens: int, found: Sequence[Result]) -> None:
    """Print the fastest configs of each path and part."""
    for path, part in dict.fromkeys((result["path"], result["part"]) for result in found):
        for result in [each for each in found if (each["path"], each["part"]) == (path, part)][:4]:
            print(name, num_tokens, path, part, result, flush=True)


def _sweep(name: str, weights: MoeWeights, steps: Sequence[MoeInputs]) -> list[Result]:
    """Return µs of both products for each config of the row kernels and, where they are served, of planes."""
    from benchmarks.moe_sweep import sweep  # here, since it needs triton

    if _planes(weights) is None:
        return sweep(SHAPES[name], weights, steps)
    from benchmarks.packed_experts import measure

    found: list[Result] = []
    for product in measure(name, weights, steps[0].x.shape[0]):
        found += [{"path": "planes", "part": product["part"], **result} for result in product["results"]]
    rows = make_weights(SHAPES[name], is_arranged=False, **BF16_CUDA)
    return sorted([*found, *sweep(SHAPES[name], rows, steps)], key=lambda result: result["us"])


def _planes(weights: MoeWeights) -> str | None:
    """Return the kind of the experts' planes; None: they are in none."""
    return weights.gate_up.kind if isinstance(weights.gate_up, PlanesMatrix) else None


def make_table(results: Sequence[Result]) -> str:
    """Return a line per shape and number of tokens."""
    rows = [["shape", "tokens", "experts", "cut", "us", "floor", "of floor", "bound by", "torch", "torch grouped"]]
    for result in results:
        rows.append([
            str(result["shape"]), str(result["tokens"]), f"{result['experts_hit']:.1f}", str(result["config"]),
            f"{result['us']:.1f}", f"{result['floor_us']:.1f}", f"{result['of_floor']:.0%}", str(result["bound"]),
            f"{result['torch_us']:.0f}",
            f"{result['torch_grouped_us']:.1f}" if "torch_grouped_us" in result else "-",
        ])  # fmt: skip
    return format_table(rows)


def _calls(function: Callable[[MoeInputs], object], steps: Sequence[MoeInputs]) -> list[Callable[[], object]]:
    return [functools.partial(function, step) for step in steps]


if __name__ == "__main__":
    main()
