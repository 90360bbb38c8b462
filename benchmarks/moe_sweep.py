"""Candidate configs of the row kernels for kernels/moe/configs.py: times each for a number of tokens, finds the best.

Those of planes are in benchmarks/packed_experts.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

import torch

from benchmarks.kernel_timing import BF16_CUDA, time_graph
from benchmarks.moe_problem import SHAPES, MoeInputs, MoeShape, MoeWeights, make_weights
from benchmarks.report import Report
from kernels.moe.configs import PAIRS_MAX_TOKENS, PairTile, Tile
from kernels.moe.reference import SILU
from kernels.moe.triton_grouped import grouped_gemm, pairs_down, pairs_gate_up
from kernels.moe.triton_route import Routing, RowTiles, lay_out, route

_SHARED_BYTES = 227 * 1024  # shared memory of an H100's SM
_BLOCKS_M = {16: (True, False), 32: (True,), 64: (False,), 128: (False,)}  # → values of `swaps`
Result = Report


def tile_candidates(block_m: int, *, is_gated: bool) -> list[Tile]:
    """Return the configs of one grouped GEMM that fit the device."""
    matrices = 2 if is_gated else 1
    found = []
    for block_n in (32, 64, 128, 256):
        for block_k in (64, 128, 256):
            for num_warps in (4, 8):
                for num_stages in (2, 3, 4, 5):
                    shared = (block_m + matrices * block_n) * block_k * 2 * num_stages
                    sums = matrices * block_m * block_n // (32 * num_warps)  # fp32 registers per thread
                    fills = 40 * 1024 <= shared <= _SHARED_BYTES
                    if fills and sums <= 128 and (num_warps == 4 or max(block_m, block_n) >= 128):
                        groups = (1, 8) if block_m >= 64 else (1,)
                        found += [Tile(block_n, block_k, num_warps, num_stages, group_m) for group_m in groups]
    return found


def pair_candidates() -> list[PairTile]:
    """Return the configs of one product per pair."""
    cuts = [(4, 512), (4, 1024), (8, 256), (8, 512), (8, 1024), (16, 128), (16, 256), (16, 512)]
    return [PairTile(*cut, num_warps=warps, num_stages=stages)
            for cut in cuts for warps in (2, 4, 8) for stages in (1, 3, 5)]  # fmt: skip


def compile_jobs(names: Iterable[str]) -> list[Callable[[], object]]:
    """Launch every candidate once, over a single expert of each shape."""
    jobs: list[Callable[[], object]] = []
    for name in names:
        shape = SHAPES[name]
        for block_m, swaps in _row_blocks():
            for is_gated in (True, False):
                for tile in tile_candidates(block_m, is_gated=is_gated):
                    jobs.append(functools.partial(_launch_grouped, shape, block_m, swaps, is_gated, tile))
        jobs += [functools.partial(_launch_pairs, shape, tile) for tile in pair_candidates()]
    return jobs


def sweep(shape: MoeShape, weights: MoeWeights, inputs: Sequence[MoeInputs]) -> list[Result]:
    """Return µs of both products for each config, the fastest first. weights: not in planes."""
    num_tokens = inputs[0].x.shape[0]
    results = _sweep_pairs(shape, weights, inputs) if num_tokens <= PAIRS_MAX_TOKENS else []
    for block_m, swaps in _row_blocks():
        if block_m <= max(16, 8 * num_tokens * shape.top_k / shape.num_experts):
            results += _sweep_grouped(shape, weights, inputs, block_m=block_m, swaps=swaps)
    return sorted(results, key=lambda result: result["us"])


def _row_blocks() -> list[tuple[int, bool]]:
    return [(block_m, swaps) for block_m, kinds in _BLOCKS_M.items() for swaps in kinds]


def _sweep_grouped(
    shape: MoeShape, weights: MoeWeights, inputs: Sequence[MoeInputs], *, block_m: int, swaps: bool
) -> list[Result]:
    num_pairs = inputs[0].x.shape[0] * shape.top_k
    tiles = [
        lay_out(_route(shape, step, chunk_tokens=64), num_experts=shape.num_experts, block_m=block_m) for step in inputs
    ]
    inner = [step.x.new_empty(num_pairs, shape.intermediate_size).normal_() for step in inputs]
    results: list[Result] = []
    for part, rows, w in (("up", [step.x for step in inputs], weights.gate_up), ("down", inner, weights.down)):
        for tile in tile_candidates(block_m, is_gated=part == "up"):
            calls = [
                functools.partial(
                    grouped_gemm, x, w, placed, tile,
                    num_pairs=num_pairs, gate=SILU if part == "up" else None, swaps=swaps, pdl=True,
                )
                for x, placed in zip(rows, tiles, strict=True)
            ]  # fmt: skip
            cut = {"path": "grouped", "part": part, "block_m": block_m, "swaps": swaps, **asdict(tile)}
            results += _time(calls, cut)
    return results


def _sweep_pairs(shape: MoeShape, weights: MoeWeights, inputs: Sequence[MoeInputs]) -> list[Result]:
    routings = [_route(shape, step, chunk_tokens=None) for step in inputs]
    num_pairs = inputs[0].x.shape[0] * shape.top_k
    inner = inputs[0].x.new_empty(num_pairs, shape.intermediate_size).normal_()
    results: list[Result] = []
    for tile in pair_candidates():
        up = [
            functools.partial(pairs_gate_up, step.x, weights.gate_up, routing, tile, gate=SILU, pdl=True)
            for step, routing in zip(inputs, routings, strict=True)
        ]
        down = [functools.partial(pairs_down, inner, weights.down, routing, tile, pdl=True) for routing in routings]
        for part, calls in (("up", up), ("down", down)):
            results += _time(calls, {"path": "pairs", "part": part, **asdict(tile)})
    return results


def _time(calls: Sequence[Callable[[], object]], cut: Result) -> list[Result]:
    try:
        return [cut | {"us": time_graph(calls, replays=7)}]
    except Exception as error:  # this config does not fit the device
        print("skipped", cut, type(error).__name__, flush=True)
        return []


def _route(shape: MoeShape, step: MoeInputs, *, chunk_tokens: int | None) -> Routing:
    return route(
        step.logits, num_experts=shape.num_experts, top_k=shape.top_k, renormalize=True,
        weights_dtype=step.x.dtype if shape.round_weights else torch.float32, chunk_tokens=chunk_tokens,
    )  # fmt: skip


def _launch_grouped(shape: MoeShape, block_m: int, swaps: bool, is_gated: bool, tile: Tile) -> None:
    k = shape.hidden_size if is_gated else shape.intermediate_size
    weights = make_weights(replace(shape, num_experts=1), is_arranged=False, **BF16_CUDA)
    placed = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in (block_m, 1, 1)]
    x = torch.zeros(1 if is_gated else shape.top_k, k, dtype=torch.bfloat16, device="cuda")
    w = weights.gate_up if is_gated else weights.down
    grouped_gemm(
        x, w, RowTiles(*placed), tile, num_pairs=shape.top_k, gate=SILU if is_gated else None, swaps=swaps, pdl=True
    )  # fmt: skip


def _launch_pairs(shape: MoeShape, tile: PairTile) -> None:
    n, k, top_k = shape.intermediate_size, shape.hidden_size, shape.top_k
    matrices = make_weights(replace(shape, num_experts=1), is_arranged=False, **BF16_CUDA)
    experts = torch.zeros(1, top_k, dtype=torch.int32, device="cuda")
    weights = torch.zeros(1, top_k, dtype=torch.bfloat16 if shape.round_weights else torch.float32, device="cuda")
    routing = Routing(weights, experts, experts, experts, 1)
    pairs_gate_up(torch.zeros(1, k, **BF16_CUDA), matrices.gate_up, routing, tile, gate=SILU, pdl=True)
    pairs_down(torch.zeros(top_k, n, **BF16_CUDA), matrices.down, routing, tile, pdl=True)
