"""Times the Triton sampler and input gathering: python -m benchmarks.kernels_sampling [--sweep] [--json FILE].

µs per call in a CUDA graph over rotated logits, beside the time to read the logits once and torch's argmax. `flat`
logits have a spread of 2 (top-p 0.9 keeps tens of thousands of tokens), `peaked` logits of 5 (some hundred tokens).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.kernel_timing import machine_facts, num_copies, precompile, time_graph
from kernels.inputs import reference as inputs
from kernels.inputs import triton as inputs_triton
from kernels.sampling.reference import SamplingState
from kernels.sampling.triton_draw import SamplingConfig, SamplingScratch, sample
from kernels.sampling.triton_truncation import find_cuts

ROWS = (1, 8, 64, 256)
SIZES = (128256, 151936)
# name: temperature, top_k, top_p, spread of the logits
CASES = {
    "greedy": (0.0, 0, 1.0, 2.0),
    "sampled": (1.0, 0, 1.0, 2.0),
    "top-k 50": (1.0, 50, 1.0, 2.0),
    "top-p 0.9 flat": (1.0, 0, 0.9, 2.0),
    "top-p 0.9 peaked": (1.0, 0, 0.9, 5.0),
    "both peaked": (0.7, 50, 0.9, 5.0),
}
COPY_TB_S = 3.0  # device memory of an H100


def main() -> None:
    """Run all cases; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other cuts of the batch too")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    for error in precompile(_compile_jobs(sweep=options.sweep)):
        print(error, flush=True)
    jobs = [functools.partial(_bench, *case) for case in itertools.product(ROWS, SIZES, CASES)]
    jobs += [functools.partial(_bench_cuts, *case) for case in itertools.product(ROWS, list(CASES)[2:])]
    jobs += [functools.partial(_bench_gathering, num_rows) for num_rows in ROWS]
    if options.sweep:
        jobs += [functools.partial(_bench_config, *job) for job in _sweep_jobs()]
    print(machine_facts())
    results: list[dict[str, object]] = []
    for job in jobs:
        results.append(job())
        columns = (f"{k} {v:.2f}" if isinstance(v, float) else str(v) for k, v in results[-1].items())
        print("  ".join(columns), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1))


def _bench(num_rows: int, size: int, name: str) -> dict[str, object]:
    calls = {pdl: _calls(num_rows, size, name, pdl=pdl) for pdl in (True, False)}
    result: dict[str, object] = {"case": f"{name:16s} S{num_rows:<3d} V{size}"}
    result |= {"us": time_graph(calls[True]), "nopdl_us": time_graph(calls[False])}
    result["floor_us"] = 2.0 * num_rows * size / COPY_TB_S * 1e-6
    if name == "greedy":
        result["argmax_us"] = time_graph([functools.partial(torch.argmax, x, dim=-1) for x in _logits(num_rows, size)])
    return result


def _bench_config(num_rows: int, name: str, config: SamplingConfig) -> dict[str, object]:
    us = time_graph(_calls(num_rows, SIZES[1], name, pdl=True, config=config))
    return {"case": f"sweep {name} S{num_rows} tile {config.tile} splits {config.num_splits:3d} "
            f"warps {config.num_warps}", "us": us}  # fmt: skip


def _bench_cuts(num_rows: int, name: str) -> dict[str, object]:
    size, (*_, spread) = SIZES[1], CASES[name]
    state, req_index, _ = _state(num_rows, name)
    scratch = SamplingScratch.allocate(max_rows=256, vocab_size=size, device=torch.device("cuda")).truncation
    find = functools.partial(find_cuts, req_index=req_index, state=state, scratch=scratch, pdl=True)
    us = time_graph([functools.partial(find, x) for x in _logits(num_rows, size, spread)])
    return {"case": f"cuts alone: {name} S{num_rows} V{size}", "us": us}


def _bench_gathering(num_rows: int) -> dict[str, object]:
    state = {
        "last_token": torch.zeros(257, dtype=torch.int64, device="cuda"),
        "num_computed": torch.full((257,), 1000, device="cuda"),
        "block_tables": torch.zeros(1, 257, 2560, dtype=torch.int32, device="cuda"),
    }
    out = inputs.DecodeInputs.allocate(num_tables=1, max_rows=256, max_blocks=2560, device=torch.device("cuda"))
    options = {"block_size": 16, "padding_row": 256, "out": out}
    req_index = torch.arange(num_rows, device="cuda")
    ours, spec = (
        functools.partial(module.gather_decode_inputs, req_index, **state, **options)
        for module in (inputs_triton, inputs)
    )
    return {"case": f"gather inputs S{num_rows}", "us": time_graph([ours] * 8), "torch_us": time_graph([spec] * 8)}


def _calls(
    num_rows: int, size: int, name: str, *, pdl: bool, config: SamplingConfig | None = None
) -> list[Callable[[], object]]:
    temperature, top_k, top_p, spread = CASES[name]
    state, req_index, positions = _state(num_rows, name)
    # max_rows: room for the most splits that the sweep tries
    scratch = SamplingScratch.allocate(max_rows=4096, vocab_size=size, device=torch.device("cuda"))
    call = functools.partial(
        sample, req_index=req_index, positions=positions, state=state, scratch=scratch,
        has_truncation=temperature > 0 and (top_k > 0 or top_p < 1), out=torch.empty_like(req_index),
        config=config, pdl=pdl,
    )  # fmt: skip
    return [functools.partial(call, x) for x in _logits(num_rows, size, spread)]


def _state(num_rows: int, name: str) -> tuple[SamplingState, torch.Tensor, torch.Tensor]:
    temperature, top_k, top_p, _ = CASES[name]
    floats = torch.tensor([temperature, top_p, 0.0], device="cuda")[:, None].repeat(1, 257)
    integers = torch.tensor([top_k, 1, 0], device="cuda")[:, None].repeat(1, 257)
    state = SamplingState(*floats, *integers)
    return state, torch.arange(num_rows, device="cuda"), torch.arange(num_rows, device="cuda")


@functools.lru_cache(maxsize=2)
def _logits(num_rows: int, size: int, spread: float = 2.0) -> list[torch.Tensor]:
    copies = num_copies(num_rows * size * 2)
    return [torch.randn(num_rows, size, device="cuda").mul_(spread).bfloat16() for _ in range(copies)]


def _sweep_jobs() -> list[tuple[int, str, SamplingConfig]]:
    splits = {1: (38, 75, 149), 8: (19, 38, 75), 64: (4, 8, 16), 256: (1, 2, 4, 8)}
    return [
        (num_rows, name, SamplingConfig(tile, num_splits, warps))
        for num_rows, counts in splits.items() for name in ("greedy", "sampled")
        for tile, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)) for num_splits in counts
        if num_splits * tile < SIZES[1] + tile
    ]  # fmt: skip


def _compile_jobs(*, sweep: bool) -> list[Callable[[], object]]:
    """Launch every timed kernel once, the slow ones to compile first."""
    cases = [(num_rows, size, name) for name in ("top-k 50", "sampled") for size in SIZES for num_rows in ROWS]
    jobs: list[Callable[[], object]] = [
        functools.partial(_launch, *case, pdl=pdl) for case in cases for pdl in (True, False)
    ]
    if sweep:
        drawn = [job for job in _sweep_jobs() if job[1] == "sampled"]
        jobs += [functools.partial(_launch, job[0], SIZES[1], job[1], pdl=True, config=job[2]) for job in drawn]
    return jobs


def _launch(num_rows: int, size: int, name: str, *, pdl: bool, config: SamplingConfig | None = None) -> None:
    _calls(num_rows, size, name, pdl=pdl, config=config)[0]()


if __name__ == "__main__":
    main()
