"""Times a rank's experts in both forms: python -m benchmarks.moe_ranks [--ranks 2,4] [--tokens 1,64] [--json FILE].

"parts": every rank has a part of each expert (--tensor-parallel-size N); "whole": some experts whole (with
--expert-parallel), of which the rank with the most chosen pairs is timed in each step, since the others wait for it.
One GPU suffices: ranks compute alone, and the sum over them is the same in both forms. The sum of all ranks' results is
first checked against one rank's. Prints a table; writes JSON. --device cpu: the torch form of one small shape, which
tries the script.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from benchmarks.kernel_timing import BF16_CUDA, TensorOptions, machine_facts, time_calls, time_graph
from benchmarks.moe_problem import (
    FP8_BLOCK,
    SHAPES,
    MoeInputs,
    MoeShape,
    MoeWeights,
    make_inputs,
    make_weights,
    share_of_experts,
)
from benchmarks.report import Report, format_table
from kernels.e2m1 import MXFP4_BLOCK, NVFP4_BLOCK
from kernels.linear.reference import BLOCK as LUT4_BLOCK
from kernels.moe import reference as moe
from models.parallel import TensorParallel

TOKENS = (1, 8, 64, 256, 1024, 8192)
NUM_STEPS = 8  # sets of inputs in turn, each choosing other experts
MAX_ERROR = 2e-2  # of the sum over ranks in bf16
FusedMoe = Callable[..., torch.Tensor]
_FP32_CPU: TensorOptions = {"dtype": torch.float32, "device": torch.device("cpu")}
_TINY = MoeShape(8, 2, 64, 32, round_weights=True)


def main() -> None:
    """Run the chosen shapes, numbers of ranks and numbers of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--ranks", default="2,4", help="comma-separated")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma-separated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.moe_ranks needs a CUDA device.")
    kind = BF16_CUDA if options.device == "cuda" else _FP32_CPU
    shapes = {name: SHAPES[name] for name in options.shapes} if options.device == "cuda" else {"tiny": _TINY}
    fused_moe = _kernels(kind["device"])
    torch.manual_seed(0)
    results: list[Report] = []
    for name, shape in shapes.items():
        weights = make_weights(shape, **kind)
        for size in map(int, options.ranks.split(",")):
            if size > shape.num_experts:
                print(f"{name}: {shape.num_experts} experts are fewer than {size} ranks", flush=True)
                continue
            parts = None
            if can_cut(shape, size):
                cut = replace(shape, intermediate_size=shape.intermediate_size // size)
                parts = make_weights(cut, **kind)
            for num_tokens in map(int, options.tokens.split(",")):
                steps = [make_inputs(shape, num_tokens, **kind) for _ in range(NUM_STEPS)]
                check(shape, weights, steps[0], size, fused_moe)
                results.append({"shape": name} | bench(shape, weights, parts, steps, size, fused_moe))
                print(results[-1], flush=True)
                if options.json:
                    options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1))
            del parts
        del weights
        torch.cuda.empty_cache()
    print(make_table(results))


def _kernels(device: torch.device) -> FusedMoe:
    """Return fused_moe, which returns a tensor unless its sum is to come late."""
    if device.type != "cuda":
        return cast("FusedMoe", moe.fused_moe)
    from kernels.moe import triton

    return cast("FusedMoe", functools.partial(triton.fused_moe, pdl=True))


def can_cut(shape: MoeShape, size: int) -> bool:
    """Return True if `size` ranks can have a part of each expert, which ends where a block of its scales does."""
    blocks = {"mxfp4": MXFP4_BLOCK, "fp8": FP8_BLOCK, "nvfp4": NVFP4_BLOCK, "nf4": LUT4_BLOCK}
    block = blocks.get(shape.storage, 1) if shape.integers is None else shape.integers.group_size
    return shape.intermediate_size % (size * block) == 0


def shares(shape: MoeShape, size: int) -> list[range]:
    """Return the experts of each rank that has whole ones."""
    return [TensorParallel(rank, size, is_expert_parallel=True).share_of_experts(shape.num_experts).here
            for rank in range(size)]  # fmt: skip


def pairs_of_ranks(shape: MoeShape, step: MoeInputs, size: int) -> list[int]:
    """Count the pairs of a token and an expert on each rank that has whole experts."""
    experts = moe.route(step.logits, top_k=shape.top_k, renormalize=True)[1]
    return [int(((experts >= here.start) & (experts < here.stop)).sum()) for here in shares(shape, size)]


def check(shape: MoeShape, weights: MoeWeights, step: MoeInputs, size: int, fused_moe: FusedMoe) -> None:
    """Assert that the sum of all ranks with whole experts is the result of one rank with all."""
    expected = _run(shape, weights, 0, step, fused_moe).float()
    parts = [
        _run(shape, share_of_experts(weights, here), here.start, step, fused_moe).float()
        for here in shares(shape, size)
    ]
    error = float((sum(parts, torch.zeros_like(expected)) - expected).norm() / expected.norm())
    assert error <= MAX_ERROR, error


def bench(
    shape: MoeShape,
    weights: MoeWeights,
    parts: MoeWeights | None,
    steps: list[MoeInputs],
    size: int,
    fused_moe: FusedMoe,
) -> Report:
    """Return µs of a rank's experts in both forms. parts: the weights of a rank with parts; None: it cannot be cut."""
    here = shares(shape, size)
    counts = [pairs_of_ranks(shape, step, size) for step in steps]
    busiest = [here[count.index(max(count))] for count in counts]
    whole = [
        functools.partial(_run, shape, share_of_experts(weights, experts), experts.start, step, fused_moe)
        for step, experts in zip(steps, busiest, strict=True)
    ]
    num_pairs = steps[0].x.shape[0] * shape.top_k
    return {
        "ranks": size,
        "tokens": steps[0].x.shape[0],
        "busiest": sum(max(count) for count in counts) / len(counts) / num_pairs,
        "whole_us": _time(whole, steps[0].x.device),
        "parts_us": None
        if parts is None
        else _time([functools.partial(_run, shape, parts, 0, step, fused_moe) for step in steps], steps[0].x.device),
    }


def _time(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    if device.type == "cuda":
        return time_graph(calls)
    return time_calls(calls, is_capturable=False, device=device)[0]


def make_table(results: list[Report]) -> str:
    """Return a line per shape, number of ranks and number of tokens."""
    rows = [["shape", "ranks", "tokens", "pairs of the busiest", "whole experts, us", "parts, us"]]
    for result in results:
        parts = "cut blocks" if result["parts_us"] is None else f"{result['parts_us']:.1f}"
        numbers = [str(result[name]) for name in ("shape", "ranks", "tokens")]
        rows.append([*numbers, f"{result['busiest']:.0%}", f"{result['whole_us']:.1f}", parts])
    return format_table(rows)


def _run(shape: MoeShape, weights: MoeWeights, first_expert: int, step: MoeInputs, fused_moe: FusedMoe) -> torch.Tensor:
    out = fused_moe(
        step.x, step.logits, weights.gate_up, weights.down,
        top_k=shape.top_k, renormalize=True, round_weights=shape.round_weights, first_expert=first_expert,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


if __name__ == "__main__":
    main()
