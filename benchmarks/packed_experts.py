"""Checks, then times, both products of packed experts in planes, with candidate tiles of kernels/moe/configs.py.

python -m benchmarks.packed_experts [--shapes gpt-oss-20b-mxfp4 …] [--tokens 1,8,64] [--seconds N] [--json FILE]

Candidates are timed in a graph over steps that choose other experts each time; their results are first compared with
those of the served tiles, which tests/gpu/test_packed_experts_cuda.py compares with the specification. The floor: the
chosen experts' bytes over the device's bandwidth, or the operations over its rate. Needs a CUDA device and Triton.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.kernel_timing import BF16_CUDA, machine_facts, nominal_rates, time_graph
from benchmarks.moe_problem import SHAPES, MoeInputs, MoeShape, MoeWeights, count_hit, make_inputs, make_weights
from benchmarks.report import Report
from kernels.moe.configs import PlanesTile, uses_pairs
from kernels.moe.planes import PlanesMatrix
from kernels.moe.reference import SILU, Gate
from kernels.moe.triton_planes import planes_gemm
from kernels.moe.triton_route import Routing, RowTiles, lay_out, route
from kernels.precompile import Compilation, collect_kernels

# Rows of a tile → (outputs, warps, stages)
TILES = {
    16: [(32, 2, 4), (32, 4, 4), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 4)],
    32: [(64, 2, 3), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 3)],
    64: [(64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3), (128, 8, 4)],
    128: [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3)],
}
_MAX_ERROR = 1e-2
Launch = Callable[[int], torch.Tensor]  # step → outputs of its pairs


def main() -> None:
    """Time the chosen shapes and numbers of tokens; print the best of each, write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packed = [name for name, shape in SHAPES.items() if shape.storage != "dense"]
    parser.add_argument("--shapes", nargs="+", choices=packed, default=["gpt-oss-20b-mxfp4", "qwen3-30b-a3b-fp8"])
    parser.add_argument("--tokens", default="1,8,64,256,1024,8192", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no case after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    torch.manual_seed(0)
    end_s = time.monotonic() + options.seconds
    results: list[Report] = []
    for name in options.shapes:
        weights = make_weights(SHAPES[name], **BF16_CUDA)
        if not (isinstance(weights.gate_up, PlanesMatrix) and isinstance(weights.down, PlanesMatrix)):
            parser.error(f"{name}: its storage has no planes")
        for num_tokens in map(int, options.tokens.split(",")):
            if time.monotonic() > end_s:
                print(f"# stopped after {options.seconds:.0f} s")
                return
            results += measure(name, weights, num_tokens)
            if options.json:
                options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
        del weights
        torch.cuda.empty_cache()


def measure(name: str, weights: MoeWeights, num_tokens: int) -> Iterator[Report]:
    """Yield the times of both products for a number of tokens, the fastest tiles first."""
    shape = SHAPES[name]
    steps = [make_inputs(shape, num_tokens, **BF16_CUDA) for _ in range(8 if num_tokens < 1024 else 2)]
    launches = dict(_launches(shape, weights, steps))
    with collect_kernels() as kernels:
        for launch in launches.values():
            launch(0)
    Compilation(list(kernels)).wait(lambda done, total: None)
    num_hit = sum(count_hit(shape, step) for step in steps) / len(steps)
    for part, num_matrices in (("up", 2), ("down", 1)):
        times = []
        expected: torch.Tensor | None = None
        for (of, block_m, tile), launch in launches.items():
            if of != part:
                continue
            out = launch(0).float()
            expected = out if expected is None else expected
            assert (out - expected).norm() <= _MAX_ERROR * expected.norm(), (name, num_tokens, part, block_m, tile)
            us = time_graph([functools.partial(launch, step) for step in range(len(steps))])
            times.append({"us": round(us, 1), "block_m": block_m, **dict(zip(_NAMES, tile, strict=True))})
        times.sort(key=lambda result: result["us"])
        floor_us = _floor_us(shape, num_tokens, num_hit, num_matrices)
        print(f"{name} {num_tokens} {part}: floor {floor_us:.1f}, {floor_us / times[0]['us']:.0%}, {times[:3]}")
        yield {"shape": name, "tokens": num_tokens, "part": part, "floor_us": floor_us, "results": times}


_NAMES = ("block_n", "num_warps", "num_stages")


def _launches(
    shape: MoeShape, weights: MoeWeights, steps: list[MoeInputs]
) -> Iterator[tuple[tuple[str, int, tuple[int, int, int]], Launch]]:
    """Yield each product with each tile that suits the number of pairs of an expert."""
    num_tokens = steps[0].x.shape[0]
    num_pairs = num_tokens * shape.top_k
    is_few = uses_pairs(num_tokens=num_tokens, top_k=shape.top_k, num_experts=shape.num_experts)
    routings = [
        route(
            step.logits,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            renormalize=True,
            weights_dtype=steps[0].x.dtype,
            chunk_tokens=None if is_few else 16,
        )
        for step in steps
    ]
    inner = [torch.randn(num_pairs, shape.intermediate_size, **BF16_CUDA) for _ in steps]
    for block_m, cuts in TILES.items():
        if block_m > max(16, 4 * num_pairs / shape.num_experts) or 8 * block_m < num_pairs / shape.num_experts:
            continue
        routed: list[Routing | RowTiles] = [
            routing if is_few else lay_out(routing, num_experts=shape.num_experts, block_m=block_m)
            for routing in routings
        ]
        products = (("up", [step.x for step in steps], weights.gate_up, SILU), ("down", inner, weights.down, None))
        for cut in cuts:
            tile = PlanesTile(*cut, group_m=1 if block_m < 64 else 8)
            for part, sources, matrix, gate in products:
                assert isinstance(matrix, PlanesMatrix)
                multiply = functools.partial(_multiply, sources, matrix, routed, tile, gate, block_m, num_pairs)
                yield (part, block_m, cut), multiply


def _multiply(
    sources: list[torch.Tensor],
    matrix: PlanesMatrix,
    routed: list[Routing | RowTiles],
    tile: PlanesTile,
    gate: Gate | None,
    block_m: int,
    num_pairs: int,
    step: int,
) -> torch.Tensor:
    return planes_gemm(
        sources[step], matrix, routed[step], tile, block_m=block_m, num_pairs=num_pairs, gate=gate, pdl=True
    )


def _floor_us(shape: MoeShape, num_tokens: int, num_hit: float, num_matrices: int) -> float:
    bytes_s, flops_s = nominal_rates()
    per_expert = num_matrices * shape.hidden_size * shape.intermediate_size
    num_bytes, num_flops = shape.bytes_per_weight * num_hit * per_expert, 2 * num_tokens * shape.top_k * per_expert
    return max(num_bytes / bytes_s, num_flops / flops_s) * 1e6


if __name__ == "__main__":
    main()
