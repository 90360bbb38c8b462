"""Checks, then times, products of many rows with their gate in one kernel, in turns with cuBLAS.

python -m benchmarks.dense_products [--only gate_up …] [--seconds N] [--turn SECONDS] [--json FILE]

A case is a model's matrix and a number of rows. Candidates are the served tile of kernels/linear/gluon_dense.py, as
"served", and others; "cuBLAS" is torch's product and the gate's kernel behind it. Each candidate is first compared with
float32 on random inputs of its own. Then they take turns of --turn seconds, three each, so that all see the clocks that
a GPU keeps under such work. TFLOP/s are of the product alone: "cuBLAS alone" has no gate. The rule is
kernels.linear.dense.pays. Needs a Hopper GPU and Triton.
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
from torch.nn import functional

from benchmarks.kernel_timing import BF16_CUDA, machine_facts, num_copies
from benchmarks.report import Report, format_table
from kernels.linear import dense, late_norm
from kernels.linear.dense import DenseConfig
from kernels.ops import gelu_tanh_and_mul, silu_and_mul
from kernels.precompile import Compilation, collect_kernels

_TOLERANCE = 6e-3  # of the norm; four times that of a row: bf16 rounds the result once, cuBLAS's products before
_CHECKED_ROWS = 1024  # random ones, since a product in float32 takes ten times as long
_TURNS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One product. size: columns of the result."""

    name: str
    rows: int
    size: int
    k: int
    is_gelu: bool = False
    is_swept: bool = False  # has all candidates

    @property
    def outputs(self) -> int:
        """Outputs of the matrix."""
        return 2 * self.size

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2.0 * self.rows * self.outputs * self.k


SERVED = DenseConfig()
CANDIDATES = {"served": SERVED, "group 8": DenseConfig(group=8), "2 stages": DenseConfig(num_stages=2)}
# In the order of their worth, since --seconds may end the list
CASES = (
    Case("8B gate_up", 8192, 14336, 4096, is_swept=True),
    Case("0.6B gate_up", 8192, 3072, 1024, is_swept=True),
    Case("Qwen2.5-7B gate_up", 8192, 18944, 3584),
    Case("1.7B gate_up", 8192, 6144, 2048),
    Case("32B gate_up", 8192, 25600, 5120),
    Case("Gemma-2-9B gate_up", 8192, 14336, 3584, is_gelu=True),
    *(Case("8B gate_up", rows, 14336, 4096) for rows in (1024, 1536, 1728, 2048, 2112, 3072, 4096, 6144)),
    *(Case("0.6B gate_up", rows, 3072, 1024) for rows in (1024, 1536, 2048, 4096)),
    *(Case("1.7B gate_up", rows, 6144, 2048) for rows in (1024, 1536, 2048, 4096)),
    Case("8B gate_up of two ranks", 8192, 7168, 4096),
    Case("8B gate_up of four ranks", 8192, 3584, 4096),
    Case("Qwen2.5-7B gate_up", 2048, 18944, 3584),
    Case("32B gate_up", 2048, 25600, 5120),
)

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Time the cases; print a line for each candidate, write all, print a table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="only cases with one of these in their names")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no case after this time")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds of a candidate's turn")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("benchmarks.dense_products needs a Hopper GPU.")
    end_s = time.monotonic() + options.seconds
    cases = [case for case in CASES if not options.only or any(word in case.name for word in options.only)]
    _compile(cases)
    results: list[Report] = []
    for case in cases:
        if time.monotonic() > end_s:
            print(f"# stopped after {options.seconds:.0f} s: {case.name} of {case.rows} rows and later are missing")
            break
        results += _measure(case, options.turn)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine_facts(), "results": results}, indent=1) + "\n")
        torch.cuda.empty_cache()
    print(make_table(results))
    print(make_summary(results))


def _candidates(case: Case) -> dict[str, Call]:
    """Return the calls by name."""
    from kernels.linear.gluon_dense import gated_linear

    activate = gelu_tanh_and_mul if case.is_gelu else silu_and_mul
    own = {
        name: functools.partial(gated_linear, is_gelu=case.is_gelu, config=config, pdl=True)
        for name, config in (CANDIDATES if case.is_swept else {"served": SERVED}).items()
    }
    return {"cuBLAS": lambda x, w: activate(functional.linear(x, w)), **own}


def _make(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random x and w, so that outputs are about normal."""
    x = torch.randn(case.rows, case.k, **BF16_CUDA)
    return x, torch.randn(case.outputs, case.k, **BF16_CUDA) * case.k**-0.5


def _compile(cases: Sequence[Case]) -> None:
    """Compile what all candidates launch, in parallel."""
    with collect_kernels() as kernels:
        for case in cases:
            inputs = _make(case)
            for call in _candidates(case).values():
                call(*inputs)
    Compilation(list(kernels)).wait(lambda done, total: None)
    torch.cuda.empty_cache()


def _measure(case: Case, turn_s: float) -> Iterator[Report]:
    """Yield the error, the time and the rate of each candidate."""
    torch.manual_seed(case.rows)
    size = 2 * (case.rows * case.k + case.outputs * case.k)
    inputs = [_make(case) for _ in range(min(4, num_copies(size)))]
    calls = _candidates(case)
    errors, failed = _check(case, calls)
    times = _time_in_turns(
        {name: call for name, call in calls.items() if name not in failed} | {"cuBLAS alone": functional.linear},
        inputs,
        turn_s,
    )
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    shares = {
        "fill": dense.fill(num_rows=case.rows, n=case.outputs, num_sms=num_sms),
        "rule": dense.pays(num_rows=case.rows, n=case.outputs, k=case.k, num_sms=num_sms),
    }
    for name in (*calls, "cuBLAS alone"):
        result: Report = dataclasses.asdict(case) | shares | {"candidate": name, "error": errors.get(name)}
        if name in failed:
            result["failed"] = failed[name]
            print(f"{case.name} {case.rows} {name}: failed: {failed[name]}", flush=True)
        else:
            result["us"] = statistics.median(times[name])
            result["turns_us"] = times[name]
            result["tflops"] = case.flops / result["us"] * 1e-6
            result["against_cublas"] = statistics.median(times["cuBLAS"]) / result["us"]
            result["rate_against_cublas"] = statistics.median(times["cuBLAS alone"]) / result["us"]
            error = "" if errors.get(name) is None else f", error {errors[name]:.2e}"
            print(
                f"{case.name} {case.rows} {name}: {result['us']:.0f} us, {result['tflops']:.0f} TFLOP/s{error}",
                flush=True,
            )
        yield result


def _check(case: Case, calls: dict[str, Call]) -> tuple[dict[str, float], dict[str, str]]:
    """Compare each candidate with float32, twice on inputs of its own; return errors, and reasons of failure."""
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        print(f"# checking {case.name} {case.rows} {name}", flush=True)  # names the one that hangs or faults
        x, w = _make(case)
        rows = torch.randperm(case.rows, device=x.device)[:_CHECKED_ROWS]
        expected = late_norm.gated_linear(x[rows].float(), w.float(), is_gelu=case.is_gelu)
        try:
            out = call(x, w)
            difference = out[rows].float() - expected
            errors[name] = float(difference.norm() / expected.norm())
            worst = float((difference.norm(dim=1) / expected.norm(dim=1)).max())
            assert max(errors[name], worst / 4) <= _TOLERANCE, f"error {errors[name]:.2e}, of a row {worst:.2e}"
            assert torch.equal(out, call(x, w)), "two runs differ"
        except Exception as error:  # a candidate that is wrong or does not fit is a result, too
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return errors, failed


def _time_in_turns(
    calls: dict[str, Call], inputs: Sequence[tuple[torch.Tensor, torch.Tensor]], turn_s: float
) -> dict[str, list[float]]:
    """Return the µs of a call in each turn. The first fifth of a turn is not counted: the clocks settle."""
    replays = {name: _capture(call, inputs) for name, call in calls.items()}
    numbers = {name: max(3, int(turn_s * 1e6 / _time(replay, 2))) for name, replay in replays.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_TURNS):
        for name, replay in replays.items():
            _time(replay, max(1, numbers[name] // 5))
            times[name].append(_time(replay, numbers[name]) / len(inputs))
    return times


def _capture(call: Call, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Return what replays a graph with a call for each of the inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for each in inputs:
            call(*each)
    return graph.replay


def _time(replay: Callable[[], None], number: int) -> float:
    """Return the µs of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(number):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / number


def make_table(results: Sequence[Report]) -> str:
    """Return a line per case and candidate; "gain": of the time of cuBLAS with the gate."""
    rows = [["matrix", "rows", "candidate", "us", "TFLOP/s", "cuBLAS with gate", "gain", "rate", "fill", "rule"]]
    baselines = {
        (result["name"], result["rows"]): result["us"] for result in results if result["candidate"] == "cuBLAS"
    }
    for result in results:
        head = [result["name"], str(result["rows"]), result["candidate"]]
        if "us" not in result:
            rows.append([*head, "failed", *[""] * 6])
            continue
        baseline = baselines[result["name"], result["rows"]]
        row = [*head, f"{result['us']:.0f}", f"{result['tflops']:.0f}", f"{baseline:.0f}"]
        row += [f"{1 - result['us'] / baseline:+.1%}", f"{result['rate_against_cublas']:.3f}"]
        rows.append([*row, f"{result['fill']:.3f}", "yes" if result["rule"] else "no"])
    return format_table(rows)


def make_summary(results: Sequence[Report]) -> str:
    """Return a line on the rule, and one per swept case with its fastest candidates."""
    timed = [result for result in results if "us" in result]
    served = [result for result in timed if result["candidate"] == "served"]
    wrong = [
        f"{result['name']} {result['rows']} ({result['against_cublas'] - 1:+.1%})"
        for result in served
        if result["rule"] != (result["against_cublas"] > 1)
    ]
    lines = [f"rule: wrong in {len(wrong)} of {len(served)}: {', '.join(wrong)}"]
    for name, rows in dict.fromkeys((result["name"], result["rows"]) for result in timed if result["is_swept"]):
        own = [result for result in timed if (result["name"], result["rows"]) == (name, rows)]
        best = sorted(own, key=lambda result: result["us"])[:4]
        lines.append(f"{name} {rows}: " + ", ".join(f"{result['candidate']} {result['us']:.0f}" for result in best))
    failed = [f"{result['name']} {result['candidate']}" for result in results if "failed" in result]
    return "\n".join([*lines, f"failed: {', '.join(failed) or 'none'}"])


if __name__ == "__main__":
    main()
