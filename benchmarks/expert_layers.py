"""Checks, then times, whole layers of packed experts, one cut beside the other: python -m benchmarks.expert_layers.

[--shapes qwen3-30b-a3b-fp8 …] [--tokens 1,8,64,512,4096,8192] [--cuts NAME …] [--kernels] [--seconds N] [--json FILE]

A layer is routing, both products and the sum over experts, as kernels.moe.triton.fused_moe launches them. Cuts: the one
that serving chooses, planes that are unpacked to registers, as all were before, and candidates; the rules are in
kernels/moe/configs.py. Each cut is first compared with the specification in float32 on inputs of its own, to the
rounding of bfloat16; where it rounds activations to FP8, with the specification that rounds them, in bfloat16, since
other values between the products have other codes in places. 16-bit experts of the same sizes are timed beside them.
Times are of graphs over steps that choose other experts each time. --kernels: of each kernel as well, by the profiler,
without early launches to overlap them. Needs a CUDA device and Triton.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.expert_cuts import cuts_of
from benchmarks.kernel_timing import BF16_CUDA, machine_facts, nominal_rates, time_graph
from benchmarks.moe_problem import (
    SHAPES,
    MoeInputs,
    MoeShape,
    MoeWeights,
    count_hit,
    floor_us,
    make_inputs,
    make_weights,
)
from benchmarks.report import Report, format_table
from kernels.moe import reference as moe
from kernels.moe.configs import Fp8Config, HopperFp8Config
from kernels.moe.triton import Config, choose, fused_moe
from kernels.precompile import Compilation, collect_kernels

TOKENS = (1, 8, 64, 512, 4096, 8192)
DEFAULT_SHAPES = ("qwen3-30b-a3b-fp8", "qwen3-30b-a3b-awq", "gpt-oss-20b-mxfp4")
_TOLERANCE, _ROUNDED_TOLERANCE = 1e-2, 2e-2
_CHECKED_ROWS = 128  # the first and the last of a step, since the specification goes expert by expert


@dataclasses.dataclass(frozen=True)
class Layer:
    """The experts of one shape, and how they are joined."""

    shape: MoeShape
    weights: MoeWeights
    gate: moe.Gate
    biases: moe.ExpertBiases | None

    def run(self, step: MoeInputs, config: Config | None, *, pdl: bool = True) -> torch.Tensor:
        """Launch the layer. config: None: as serving chooses."""
        out = fused_moe(
            step.x, step.logits, self.weights.gate_up, self.weights.down,
            top_k=self.shape.top_k, renormalize=True, round_weights=self.shape.round_weights,
            gate=self.gate, biases=self.biases, config=config, pdl=pdl,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def specify(self, step: MoeInputs, rows: torch.Tensor, *, is_rounded: bool) -> torch.Tensor:
        """Return those rows of a step by the specification: in bfloat16 if activations are rounded, else in float32."""
        x, biases = step.x[rows], self.biases
        if not is_rounded:
            x, biases = x.float(), biases and moe.ExpertBiases(biases.gate_up.float(), biases.down.float())
        out = moe.fused_moe(
            x, step.logits[rows], self.weights.gate_up, self.weights.down,
            top_k=self.shape.top_k, renormalize=True, round_weights=self.shape.round_weights,
            gate=self.gate, biases=biases, rounding=moe.round_to_fp8 if is_rounded else None,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.float()


def main() -> None:
    """Time the chosen shapes and numbers of tokens; print a line for each cut, write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(DEFAULT_SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma-separated")
    parser.add_argument("--cuts", nargs="+", help="only those whose names begin so; all: left out")
    parser.add_argument("--kernels", action="store_true", help="time each kernel of a layer, too")
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no number of tokens after this time")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.expert_layers needs a CUDA device.")
    torch.manual_seed(0)
    end_s = time.monotonic() + options.seconds
    results: list[Report] = []
    for name in options.shapes:
        layers = {name: make_layer(SHAPES[name])}
        layers["16 bits"] = make_layer(dataclasses.replace(SHAPES[name], storage="dense", integers=None))
        counts = [int(tokens) for tokens in options.tokens.split(",")]
        cuts = {tokens: _chosen(cuts_of(layers[name].weights, SHAPES[name], tokens), options.cuts) for tokens in counts}
        _compile(layers, cuts, has_kernels=options.kernels)
        for tokens in counts:
            if time.monotonic() > end_s:
                print(f"# stopped after {options.seconds:.0f} s: {name} from {tokens} tokens on is missing")
                break
            results += _measure(name, layers, tokens, cuts[tokens], has_kernels=options.kernels)
            if options.json:
                options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
        layers.clear()
        torch.cuda.empty_cache()
    print(make_table(results))


def make_layer(shape: MoeShape) -> Layer:
    """Make random experts; those of MXFP4 are joined and biased as gpt-oss's, 16-bit ones of its sizes too."""
    is_gpt_oss = shape.hidden_size == shape.intermediate_size
    biases = None
    if is_gpt_oss:
        gate_up = torch.randn(shape.num_experts, 2 * shape.intermediate_size, **BF16_CUDA)
        biases = moe.ExpertBiases(gate_up, torch.randn(shape.num_experts, shape.hidden_size, **BF16_CUDA))
    gate = moe.Gate("clamped", alpha=1.702, limit=7.0) if is_gpt_oss else moe.SILU
    return Layer(shape, make_weights(shape, **BF16_CUDA), gate, biases)


def _chosen(cuts: dict[str, Config | None], names: Sequence[str] | None) -> dict[str, Config | None]:
    return {name: cut for name, cut in cuts.items() if names is None or any(map(name.startswith, names))}


def _compile(layers: dict[str, Layer], cuts: dict[int, dict[str, Config | None]], *, has_kernels: bool) -> None:
    """Compile what all cuts launch, in parallel."""
    with collect_kernels() as kernels:
        for name, layer in layers.items():
            for tokens, configs in cuts.items():
                step = make_inputs(layer.shape, tokens, **BF16_CUDA)
                for config in configs.values() if name != "16 bits" else [None]:
                    for pdl in {True, not has_kernels}:
                        layer.run(step, config, pdl=pdl)
    Compilation(list(kernels)).wait(lambda done, total: None)


def _measure(
    name: str, layers: dict[str, Layer], tokens: int, cuts: dict[str, Config | None], *, has_kernels: bool
) -> Iterator[Report]:
    """Yield the error and the time of each cut."""
    shape = layers[name].shape
    steps = [make_inputs(shape, tokens, **BF16_CUDA) for _ in range(8 if tokens < 1024 else 2)]
    num_hit = sum(count_hit(shape, step) for step in steps) / len(steps)
    bytes_s, flops_s = nominal_rates()
    dense_us = time_graph(_calls(layers["16 bits"], steps, None))
    specified: dict[bool, torch.Tensor] = {}
    for cut, config in cuts.items():
        is_rounded = _rounds(layers[name], steps[0], config)
        floor, bound = floor_us(shape, tokens, num_hit, bytes_s=bytes_s, flops_s=flops_s * (2 if is_rounded else 1))
        result: Report = {
            "shape": name, "tokens": tokens, "experts_hit": num_hit, "cut": cut, "config": repr(config),
            "floor_us": floor, "bound": bound, "dense_us": dense_us,
        }  # fmt: skip
        try:
            result |= _check(layers[name], steps[0], config, specified, is_rounded=is_rounded)
            result["us"] = time_graph(_calls(layers[name], steps, config))
            if has_kernels:
                result["kernels_us"] = _time_kernels(layers[name], steps[0], config)
        except (AssertionError, RuntimeError) as error:  # a candidate that is wrong or does not fit is a result, too
            result["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        text = result.get("failed") or f"{result['us']:.1f} us, error {result['error']:.2%}"
        print(f"{name} {tokens} {cut}: {text}; 16 bits {dense_us:.1f}", flush=True)
        print("".join(f"  {us:8.1f} us {kernel}\n" for kernel, us in result.get("kernels_us", [])), end="", flush=True)
        yield result


def _rounds(layer: Layer, step: MoeInputs, config: Config | None) -> bool:
    """Return True if a cut rounds activations to FP8."""
    shape, weights = layer.shape, layer.weights
    if config is None:
        config = choose(
            step.x, weights.gate_up, weights.down, top_k=shape.top_k, num_experts=shape.num_experts, gate=layer.gate
        )  # fmt: skip
    return isinstance(config, Fp8Config | HopperFp8Config)


def _calls(layer: Layer, steps: Sequence[MoeInputs], config: Config | None) -> list[Callable[[], torch.Tensor]]:
    return [functools.partial(layer.run, step, config) for step in steps]


def _time_kernels(layer: Layer, step: MoeInputs, config: Config | None) -> list[tuple[str, float]]:
    """Return the kernels of a layer in their order, each with its median time of some runs in µs."""
    runs = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            layer.run(step, config, pdl=False)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events = sorted(events, key=lambda event: event.time_range.start)
    count = len(events) // runs
    return [(events[i].name, statistics.median(event.device_time for event in events[i::count])) for i in range(count)]


def _check(
    layer: Layer, step: MoeInputs, config: Config | None, specified: dict[bool, torch.Tensor], *, is_rounded: bool
) -> dict[str, float]:
    """Assert that two runs are equal and the specification's; return the error against activations as they are."""
    tokens = step.x.shape[0]
    rows = torch.arange(tokens, device=step.x.device)
    rows = torch.cat((rows[:_CHECKED_ROWS], rows[max(_CHECKED_ROWS, tokens - _CHECKED_ROWS) :]))
    for rounded in {False, is_rounded} - specified.keys():
        specified[rounded] = layer.specify(step, rows, is_rounded=rounded)
    out = layer.run(step, config)
    assert torch.equal(out, layer.run(step, config)), "two runs differ"
    errors = {
        rounded: float((out[rows].float() - expected).norm() / expected.norm())
        for rounded, expected in specified.items()
    }
    assert errors[is_rounded] <= (_ROUNDED_TOLERANCE if is_rounded else _TOLERANCE), errors
    return {"error": errors[False], "error_of_specified": errors[is_rounded]}


def make_table(results: Sequence[Report]) -> str:
    """Return a line per shape, number of tokens and cut."""
    rows = [["shape", "tokens", "cut", "us", "floor", "of floor", "16 bits", "against 16 bits", "error"]]
    for result in results:
        head = [result["shape"], str(result["tokens"]), result["cut"]]
        if "us" not in result:
            rows.append([*head, "failed", f"{result['floor_us']:.1f}", "", f"{result['dense_us']:.1f}", "", ""])
            continue
        us, floor, dense = result["us"], result["floor_us"], result["dense_us"]
        shares = [f"{floor:.1f}", f"{floor / us:.0%}", f"{dense:.1f}", f"{dense / us:.2f}"]
        rows.append([*head, f"{us:.1f}", *shares, f"{result['error']:.2%}"])
    return format_table(rows)


if __name__ == "__main__":
    main()
