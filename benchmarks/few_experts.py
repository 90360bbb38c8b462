"""Checks, then times, layers of packed experts with few tokens, as served beside mma.sync.

python -m benchmarks.few_experts [--shapes NAME …] [--tokens 1,8,2,4,16] [--rule] [--seconds N]
    [--json FILE]

Both products are timed alone for each candidate tile of kernels/moe/gluon_few.py, with their routing done before; then
whole layers, with routing and sum, of the fastest tiles for each number of rows, beside the layer of the other kernels
and that of few_config. A candidate is first compared with the specification in float32, and two runs with one another.
The table comes last: the layer of the other kernels, that of the rule, the fastest, and the floor, which is the chosen
experts' bytes at 3.35 TB/s. A line "WRONG" or "FAILED" is a candidate to look at.

--rule: the layers of the first two alone.

Times are of graphs over eight steps that choose other experts each time. Needs a Hopper GPU and Triton.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.expert_layers import Layer, make_layer
from benchmarks.kernel_timing import BF16_CUDA, machine_facts, nominal_rates, time_graph
from benchmarks.moe_problem import SHAPES, MoeInputs, count_hit, floor_us, make_inputs
from benchmarks.report import Report, format_table
from kernels.moe.configs import PlanesConfig, PlanesPairsConfig, planes_config
from kernels.moe.few_configs import FewConfig, FewTile
from kernels.moe.gluon_few import few_product, few_sum
from kernels.moe.planes import GROUP, PlanesMatrix
from kernels.moe.triton import Config, choose
from kernels.moe.triton_planes import planes_gemm
from kernels.moe.triton_planes_pairs import planes_pairs_down, planes_pairs_up
from kernels.moe.triton_route import Routing, RowTiles, lay_out, route
from kernels.moe.triton_route_few import route_few, routes_once
from kernels.precompile import Compilation, collect_kernels

DEFAULT_SHAPES = (
    "qwen3-30b-a3b-awq", "gpt-oss-20b-mxfp4", "qwen3-30b-a3b-nvfp4", "qwen3-30b-a3b-fp8", "glm-4.5-air-int4",
    "gpt-oss-120b-mxfp4", "qwen3.5-35b-a3b-fp8",
)  # fmt: skip
# Rows of a tile → (outputs, warps, splits, groups of each split at once, most registers) of the first product
UP: dict[int, list[tuple[int, ...]]] = {
    1: [
        (16, 8, 8, 4),
        (16, 8, 8, 2),
        (16, 8, 8, 4, 80),
        (16, 8, 8, 4, 128),
        (16, 8, 8, 2, 128),
        (16, 4, 8, 4),
        (32, 8, 8, 4),
        (16, 16, 16, 2),
    ],
    2: [(16, 4, 4, 4), (16, 4, 4, 2), (16, 8, 8, 4), (32, 8, 4, 4)],
    4: [(32, 4, 2, 4), (32, 4, 2, 2), (32, 4, 2, 3), (16, 4, 4, 4), (16, 2, 2, 4)],
    8: [(64, 4, 1, 4), (64, 4, 1, 3), (64, 4, 1, 2), (32, 2, 1, 4), (64, 8, 2, 2), (32, 4, 2, 3)],
    16: [(64, 4, 1, 3), (64, 4, 1, 2), (32, 2, 1, 3)],
}
# and of the second
DOWN: dict[int, list[tuple[int, ...]]] = {
    2: [(32, 8, 4, 4), (64, 8, 4, 2), (16, 4, 4, 6)],
    4: [(64, 8, 2, 4), (32, 4, 2, 6), (64, 8, 4, 2)],
    8: [(64, 4, 1, 6), (64, 4, 1, 3), (64, 8, 2, 4), (128, 8, 1, 6), (32, 4, 2, 3)],
    16: [(64, 4, 1, 6), (64, 4, 1, 3), (32, 2, 1, 4)],
}
# Of the sum over the experts with 8 columns, and with 16 twice the warps: (outputs, warps, groups of a split at once)
SUMS = [(16, 8, 6), (16, 8, 12), (16, 8, 3), (16, 4, 6), (32, 8, 6)]
_TOLERANCE = 1.5e-2
Product = Callable[[int], torch.Tensor]  # step → outputs


def main() -> None:
    """Time the chosen shapes and numbers of tokens; print a line for each product, then a table; write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packed = [name for name, shape in SHAPES.items() if shape.storage != "dense"]
    parser.add_argument("--shapes", nargs="+", choices=packed, default=list(DEFAULT_SHAPES))
    parser.add_argument("--tokens", default="1,8,2,4,16", help="comma-separated, the most important first")
    parser.add_argument("--rule", action="store_true", help="time no candidates")
    parser.add_argument("--seconds", type=float, default=75.0, help="begin no number of tokens after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.few_experts needs a CUDA device.")
    torch.manual_seed(0)
    end_s = time.monotonic() + options.seconds
    counts = [int(tokens) for tokens in options.tokens.split(",")]
    results: list[Report] = []
    layers = {name: make_layer(SHAPES[name]) for name in options.shapes}
    problems = {(name, tokens): Problem(layer, tokens) for name, layer in layers.items() for tokens in counts}
    _compile(list(problems.values()), of_rule=options.rule)
    print(f"# compiled {end_s - time.monotonic():.0f} s before the end", flush=True)
    for tokens, name in ((tokens, name) for tokens in counts for name in options.shapes):
        if time.monotonic() > end_s:
            print(f"# stopped after {options.seconds:.0f} s: {name} with {tokens} tokens is missing")
            continue
        results.append({"shape": name, "tokens": tokens} | problems[name, tokens].measure(name, of_rule=options.rule))
        if options.json:
            options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
    print(make_table(results))


class Problem:
    """Steps of so many tokens through one layer, routed for tiles of each number of rows."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        shape = layer.shape
        self.layer, self.tokens, self.num_pairs = layer, tokens, tokens * shape.top_k
        self.steps = [make_inputs(shape, tokens, **BF16_CUDA) for _ in range(8)]
        assert isinstance(layer.weights.gate_up, PlanesMatrix)
        assert isinstance(layer.weights.down, PlanesMatrix)
        self.gate_up, self.down = layer.weights.gate_up, layer.weights.down
        self.inner = [torch.randn(self.num_pairs, shape.intermediate_size, **BF16_CUDA) for _ in self.steps]
        sizes = {"top_k": shape.top_k, "num_experts": shape.num_experts}
        self.other = planes_config(self.gate_up.kind, num_tokens=tokens, can_round=True, **sizes)
        self.served = choose(self.steps[0].x, self.gate_up, self.down, gate=layer.gate, **sizes)
        self._routed: dict[int, list[Routing | RowTiles]] = {}

    def routed(self, block_m: int) -> list[Routing | RowTiles]:
        """Return the routing of each step, laid out in tiles of block_m rows; 1: as it is."""
        if block_m not in self._routed:
            steps: list[Routing | RowTiles] = []
            for step in self.steps:
                routing = self._route(step, None if block_m == 1 else 4)
                if block_m > 1:
                    steps.append(lay_out(routing, num_experts=self.layer.shape.num_experts, block_m=block_m, pdl=True))
                else:
                    steps.append(routing)
            self._routed[block_m] = steps
        return self._routed[block_m]

    def _route(self, step: MoeInputs, chunk_tokens: int | None) -> Routing:
        return route(step.logits, chunk_tokens=chunk_tokens, **self._options())

    def _options(self) -> dict[str, Any]:
        shape = self.layer.shape
        dtype = torch.bfloat16 if shape.round_weights else torch.float32
        return {
            "num_experts": shape.num_experts, "top_k": shape.top_k, "renormalize": True, "weights_dtype": dtype,
            "pdl": True,
        }  # fmt: skip

    def _routings(self) -> dict[str, Callable[[MoeInputs], object]]:
        """Return the ways from logits to tiles of 4 rows, or of one row for one token."""
        if self.tokens == 1:
            return {"served": lambda step: self._route(step, None)}
        num_experts = self.layer.shape.num_experts
        ways: dict[str, Callable[[MoeInputs], object]] = {
            "two launches": lambda step: lay_out(
                self._route(step, 4), num_experts=num_experts, block_m=4, pdl=True
            )
        }  # fmt: skip
        if self._routes_once():
            ways["one launch"] = lambda step: route_few(step.logits, block_m=4, **self._options())
        return ways

    def _routes_once(self) -> bool:
        shape = self.layer.shape
        return routes_once(num_tokens=self.tokens, top_k=shape.top_k, num_experts=shape.num_experts)

    def products(self) -> Iterator[tuple[str, int, FewTile | None, Product]]:
        """Yield ("up" or "down", rows of a tile, tile, product) of each candidate; tile None: the one that serves."""
        yield from self._served_products()
        seen = set()
        for part, block_m, tile, product in self._candidates():
            steps = -(-(self.gate_up if part == "up" else self.down).shape[2] // (GROUP * tile.splits))
            key = part, block_m, dataclasses.replace(tile, ahead=min(tile.ahead, steps))
            if key not in seen:
                yield part, block_m, tile, product
            seen.add(key)

    def _candidates(self) -> Iterator[tuple[str, int, FewTile, Product]]:
        for block_m, cuts in UP.items():
            if (block_m == 1) != (self.tokens == 1) or not self._may_gain(block_m):
                continue
            for tile in (FewTile(*cut) for cut in cuts):
                if _suits(tile, self.gate_up, rows=block_m, combinations=tile.splits, halves=2):
                    yield "up", block_m, tile, functools.partial(self._product, block_m, tile, "up")
            for tile in (FewTile(*cut) for cut in DOWN.get(block_m, [])):
                if _suits(tile, self.down, rows=block_m, combinations=tile.splits, halves=1):
                    yield "down", block_m, tile, functools.partial(self._product, block_m, tile, "down")
        if self.tokens == 1:
            places = 1 << (self.layer.shape.top_k - 1).bit_length()
            for columns in (8, 16):
                for outputs, warps, ahead in SUMS:
                    tile = FewTile(outputs, warps * columns // 8, columns // places, ahead)
                    if tile.splits and _suits(tile, self.down, rows=1, combinations=columns, halves=1):
                        yield "down", 1, tile, functools.partial(self._sum, tile)

    def _may_gain(self, block_m: int) -> bool:
        """Return False for tiles with room for more rows than there are, or for fewer than an expert has."""
        average = self.num_pairs / self.layer.shape.num_experts
        return block_m == 1 or (average / 2 <= block_m <= 2 * self.tokens and (block_m > 2 or self.tokens <= 4))

    def _served_products(self) -> Iterator[tuple[str, int, FewTile | None, Product]]:
        config = self.other
        if isinstance(config, PlanesPairsConfig):
            yield "up", 0, None, functools.partial(self._pairs, config, "up")
            yield "down", 0, None, functools.partial(self._pairs, config, "down")
        elif isinstance(config, PlanesConfig):
            yield "up", 0, None, functools.partial(self._registers, config, "up")
            yield "down", 0, None, functools.partial(self._registers, config, "down")

    def _bias(self, part: str) -> torch.Tensor | None:
        biases = self.layer.biases
        if biases is None:
            return None
        return biases.gate_up if part == "up" else biases.down

    def _product(self, block_m: int, tile: FewTile, part: str, step: int) -> torch.Tensor:
        is_up = part == "up"
        return few_product(
            self.steps[step].x if is_up else self.inner[step], self.gate_up if is_up else self.down,
            self.routed(block_m)[step], tile, block_m=block_m, num_pairs=self.num_pairs,
            gate=self.layer.gate if is_up else None,
            bias=self._bias(part), pdl=True,
        )  # fmt: skip

    def _sum(self, tile: FewTile, step: int) -> torch.Tensor:
        routing = self.routed(1)[step]
        assert isinstance(routing, Routing)
        return few_sum(self.inner[step], self.down, routing, tile, bias=self._bias("down"), pdl=True)

    def _pairs(self, config: PlanesPairsConfig, part: str, step: int) -> torch.Tensor:
        routing = self.routed(1)[step]
        assert isinstance(routing, Routing)
        if part == "up":
            return planes_pairs_up(
                self.steps[step].x, self.gate_up, routing, config.up, gate=self.layer.gate,
                bias=self._bias("up"), pdl=True,
            )  # fmt: skip
        return planes_pairs_down(
            self.inner[step], self.down, routing, config.down, bias=self._bias("down"), pdl=True
        )  # fmt: skip

    def _registers(self, config: PlanesConfig, part: str, step: int) -> torch.Tensor:
        is_up = part == "up"
        return planes_gemm(
            self.steps[step].x if is_up else self.inner[step], self.gate_up if is_up else self.down,
            self.routed(1 if config.chunk_tokens is None else config.block_m)[step],
            config.up if is_up else config.down, block_m=config.block_m, num_pairs=self.num_pairs,
            gate=self.layer.gate if is_up else None, bias=self._bias(part),
            pdl=True,
        )  # fmt: skip

    def measure(self, name: str, *, of_rule: bool) -> Report:
        """Time all products, then whole layers of the fastest tiles. of_rule: no candidates."""
        times: list[Report] = []
        steps = range(len(self.steps))
        for part, block_m, tile, product in () if of_rule else self.products():
            try:
                us = time_graph([functools.partial(product, step) for step in steps], replays=9)
            except (AssertionError, RuntimeError, TritonError) as failure:
                print(f"FAILED {name} {self.tokens} {part} {block_m} {tile}: {str(failure)[:200]}", flush=True)
                continue
            times.append({"part": part, "block_m": block_m, "tile": tile, "us": us})
        routes_us = {
            kind: time_graph([functools.partial(call, step) for step in self.steps], replays=9)
            for kind, call in self._routings().items()
        }
        layers: list[Report] = []
        rows = torch.arange(self.tokens, device=self.steps[0].x.device)
        expected = self.layer.specify(self.steps[0], rows, is_rounded=False)
        candidates: list[Config] = list(dict.fromkeys([self.other, self.served, *self._configs(times)]))
        for config in candidates:
            try:
                error = self._check(config, expected)
                calls = [functools.partial(self.layer.run, step, config) for step in self.steps]
                us = min(time_graph(calls) for _ in range(2))
            except (AssertionError, RuntimeError, TritonError) as failure:
                print(f"WRONG {name} {self.tokens} {config}: {str(failure)[:200]}", flush=True)
                continue
            layers.append({"config": repr(config), "us": us, "error": error} | self._roles(config))
        num_hit = sum(count_hit(self.layer.shape, step) for step in self.steps) / len(self.steps)
        bytes_s, flops_s = nominal_rates()
        floor, _ = floor_us(self.layer.shape, self.tokens, num_hit, bytes_s=bytes_s, flops_s=flops_s)
        for part, share in (("up", 2 / 3), ("down", 1 / 3)):
            found = sorted((each for each in times if each["part"] == part), key=lambda each: each["us"])
            found = found[:4] + [each for each in found[4:] if each["tile"] is None]
            shown = [f"{each['us']:.1f} ({_short(each)})" for each in found]
            print(f"{name} {self.tokens} {part}: floor {floor * share:.1f}; {', '.join(shown)}", flush=True)
        print(f"{name} {self.tokens} routing: {', '.join(f'{us:.1f} ({kind})' for kind, us in routes_us.items())}")
        products = [each | {"tile": each["tile"] and repr(each["tile"])} for each in times]
        return {
            "floor_us": floor,
            "experts_hit": num_hit,
            "routes_us": routes_us,
            "products": products,
            "layers": layers,
        }

    def _configs(self, times: Sequence[Report]) -> Iterator[FewConfig]:
        """Yield the fastest two tiles of the first product with the fastest of the second, for each height of tiles."""
        for block_m in UP:
            ups, downs = (
                sorted(
                    (each for each in times if each["tile"] and each["part"] == part and each["block_m"] == block_m),
                    key=lambda each: each["us"],
                )
                for part in ("up", "down")
            )
            for up in ups[:2]:
                for down in downs[: 2 if block_m == 1 else 1]:
                    config = FewConfig(block_m, up["tile"], down["tile"])
                    yield config
                    if block_m == 1 and up is ups[0] and down is downs[0]:
                        yield dataclasses.replace(config, chooses=True)

    def _roles(self, config: Config) -> Report:
        return {"is_other": config == self.other, "is_served": config == self.served}

    def _check(self, config: Config, expected: torch.Tensor) -> float:
        """Assert that two runs are equal, and near the specification; return the error."""
        out = self.layer.run(self.steps[0], config)
        assert torch.equal(out, self.layer.run(self.steps[0], config)), "two runs differ"
        error = float((out.float() - expected).norm() / expected.norm())
        assert error <= _TOLERANCE, f"error {error:.2%}"
        return error


def _suits(tile: FewTile, w: PlanesMatrix, *, rows: int, combinations: int, halves: int) -> bool:
    """Return True if the kernels take the tile. combinations: of splits and experts; rows: of x, of each."""
    return (
        rows * combinations in (8, 16)
        and w.shape[1] // halves % tile.outputs == 0
        and tile.num_warps <= tile.outputs // 16 * combinations
    )


def _short(found: Report) -> str:
    tile = found["tile"]
    if tile is None:
        return "served"
    limit = f" ≤{tile.max_registers}" if tile.max_registers else ""
    return f"{found['block_m']}r {tile.outputs}o {tile.num_warps}w {tile.splits}s {tile.ahead}a{limit}"


def _compile(problems: Sequence[Problem], *, of_rule: bool) -> None:
    """Compile what all candidates launch, in parallel."""
    with collect_kernels() as kernels:
        for problem in problems:
            for block_m in () if of_rule else UP:
                problem.routed(block_m)
            problem._routed.clear()
            for _, _, _, product in () if of_rule else problem.products():
                product(0)
            for choose_experts in problem._routings().values():
                choose_experts(problem.steps[0])
            for block_m in UP if not of_rule and problem.tokens > 1 and problem._routes_once() else ():
                route_few(problem.steps[0].logits, block_m=block_m, **problem._options())
            problem._routed.clear()
            for config in dict.fromkeys((problem.other, problem.served)):
                problem.layer.run(problem.steps[0], config)
    Compilation(list(kernels)).wait(lambda done, total: None)


def make_table(results: Sequence[Report]) -> str:
    """Return a line per shape and number of tokens."""
    rows = [["shape", "tokens", "floor", "others", "of floor", "served", "of floor", "speed", "fastest", "config"]]
    for result in results:
        floor, layers = result["floor_us"], result["layers"]
        other, served = (
            next((each["us"] for each in layers if each[role]), None) for role in ("is_other", "is_served")
        )  # fmt: skip
        row = [result["shape"], str(result["tokens"]), f"{floor:.1f}"]
        for us in (other, served):
            row += ["–", "–"] if us is None else [f"{us:.1f}", f"{floor / us:.0%}"]
        row.append("–" if other is None or served is None else f"{other / served:.2f}")
        best = min(layers, key=lambda each: each["us"], default=None)
        rows.append([*row, *(["–", ""] if best is None else [f"{best['us']:.1f}", best["config"]])])
    return format_table(rows)


if __name__ == "__main__":
    main()
