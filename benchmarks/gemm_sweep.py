"""Which cut of which kernel is the best for a product of 65 to 512 rows: checked, timed beside cuBLAS, as a table.

Every candidate at 256, 128 and 192 rows, the best of them at the sizes between; and the best of each after a norm, as
they run in a model (there a kernel may start beside the one before it), which decides.

    python -m benchmarks.gemm_sweep --out sweep.json --seconds 150
    python -m benchmarks.gemm_sweep --table sweep.json        # rows for kernels/gemm_configs.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gemm_candidates import FAMILIES, Candidate, candidates, family_of, features_of, name_of, run
from benchmarks.gemm_worker import Job, Outcome, Worker
from benchmarks.kernel_timing import machine_facts
from benchmarks.kernels_linear import GEMV_SHAPES
from kernels.compile_ahead import Compilation, collect_kernels
from kernels.gemm_configs import GemmScratch, num_programs
from kernels.triton_elementwise import rms_norm
from kernels.triton_gemv import GemvScratch

ROWS = (256, 128, 192)  # every candidate
BETWEEN = {80: 128, 96: 128, 160: 192, 224: 256, 384: 192, 512: 256}  # → whose best are tried
_NUM_TRIED, _NUM_CHAINED = 8, 6
_COPY_TB_S, _TFLOPS = 3.01, 798.0  # of an H100, measured: docs/performance.md
_MAX_STRIKES = 3  # failures of a kind, after which its other candidates are left out; a lost process counts twice
_RESERVED_S = 35.0  # for the sizes between
_WORTH = 0.97  # of cuBLAS's time: what is not that much faster stays with cuBLAS


class Sweep:
    """What was measured so far. Life: __init__ → the rounds → write, print_table."""

    def __init__(self, shapes: dict[str, tuple[int, int]], *, worker: Worker, num_sms: int, deadline_s: float) -> None:
        """deadline_s: of time.monotonic()."""
        self._shapes, self._worker, self._num_sms, self._deadline_s = shapes, worker, num_sms, deadline_s
        self._strikes: Counter[str] = Counter()
        self._working: set[str] = set()  # kinds of which one was right
        self.failures: list[dict[str, object]] = []
        self.num_left_out = 0
        # (shape, rows, is_chain) → us by candidate, None being cuBLAS
        self.us: dict[tuple[str, int, bool], dict[Candidate | None, float]] = {}

    def try_all(self, num_rows: int) -> None:
        """Every candidate of every shape, cuBLAS first."""
        for shape, (n, k) in self._shapes.items():
            wanted = candidates(num_rows=num_rows, n=n, k=k, num_sms=self._num_sms)
            self._measure(shape, num_rows, [None, *wanted], is_chain=False, reserved_s=_RESERVED_S)

    def try_best_of(self, like: int, num_rows: int) -> None:
        """At num_rows, the best there were at `like` rows."""
        for shape, (n, k) in self._shapes.items():
            sizes = {"num_rows": num_rows, "n": n, "k": k, "num_sms": self._num_sms}
            best = [c for c in self.best(shape, like, is_chain=False) if num_programs(c, **sizes) > 0]
            self._measure(shape, num_rows, [None, *best[:_NUM_TRIED]], is_chain=False)

    def try_chains(self, num_rows: int) -> None:
        """The best there, after a norm."""
        for shape in self._shapes:
            best = self.best(shape, num_rows, is_chain=False)[:_NUM_CHAINED]
            self._measure(shape, num_rows, [None, *best], is_chain=True)

    def best(self, shape: str, num_rows: int, *, is_chain: bool) -> list[Candidate]:
        """The candidates measured there, the fastest first."""
        us = self.us.get((shape, num_rows, is_chain), {})
        return sorted((found for found in us if found is not None), key=lambda found: us[found])

    def _measure(
        self, shape: str, num_rows: int, wanted: list[Candidate | None], *, is_chain: bool, reserved_s: float = 0.0
    ) -> None:
        n, k = self._shapes[shape]
        for candidate in wanted:
            features = features_of(candidate)
            left_s = self._deadline_s - time.monotonic()
            if left_s < 1 + reserved_s or any(self._strikes[feature] >= _MAX_STRIKES for feature in features):
                self.num_left_out += 1
                continue
            outcome = self._worker.measure(Job(n, k, num_rows, candidate, is_chain), timeout_s=min(10.0, left_s + 5))
            if outcome.us is not None:
                self.us.setdefault((shape, num_rows, is_chain), {})[candidate] = outcome.us
                self._working.update(features)
            else:
                self._note(outcome, features, f"{shape} M{num_rows} {name_of(candidate) if candidate else 'cuBLAS'}")

    def _note(self, outcome: Outcome, features: list[str], case: str) -> None:
        for feature in features:
            if feature == features[0] or feature not in self._working:
                self._strikes[feature] += 2 if outcome.is_fatal else 1
        self.failures.append({"case": case, "feature": features[0], "failure": outcome.failure})
        print("failed:", case, outcome.failure, flush=True)

    def as_json(self) -> dict[str, object]:
        """All that was measured."""
        results = [
            {"shape": shape, "n": self._shapes[shape][0], "k": self._shapes[shape][1], "rows": num_rows,
             "chain": is_chain, "us": round(us, 3),
             "family": "cuBLAS" if candidate is None else family_of(candidate),
             "config": None if candidate is None else asdict(candidate)}
            for (shape, num_rows, is_chain), found in self.us.items() for candidate, us in found.items()
        ]  # fmt: skip
        return {"facts": machine_facts(), "results": results, "failures": self.failures, "left_out": self.num_left_out}

    def print_table(self) -> None:
        """Per product: floor, cuBLAS, the two best alone; and after a norm, which is what counts in a model."""
        for (shape, num_rows, is_chain), us in self.us.items():
            if is_chain or None not in us or len(us) < 2:
                continue
            n, k = self._shapes[shape]
            floor = max((n * k + num_rows * (n + k)) * 2 / _COPY_TB_S * 1e-6, 2 * num_rows * n * k / _TFLOPS * 1e-6)
            alone = [f"{us[found]:.1f} {name_of(found)}" for found in self.best(shape, num_rows, is_chain=False)[:2]]
            chained = self.us.get((shape, num_rows, True), {})
            after = [f"{chained[c]:.1f} {name_of(c)}" for c in self.best(shape, num_rows, is_chain=True)[:1]]
            cublas_after = f"{chained[None]:.1f}" if None in chained else "-"
            print(f"{shape} M{num_rows}: {floor:.1f} cu {us[None]:.1f} | {' | '.join(alone)}"
                  f" | norm+ cu {cublas_after} | {after[0] if after else '-'}")  # fmt: skip


def compile_all(shapes: dict[str, tuple[int, int]], *, num_sms: int) -> str:
    """Fill Triton's cache on disk with every candidate, side by side. Launches nothing."""
    scratch = (
        GemmScratch.allocate(torch.device("cpu"), num_sms=num_sms),
        GemvScratch.allocate(torch.device("cpu"), capacity=1 << 23),
    )
    largest = max(n * k for n, k in shapes.values())
    x, w = torch.empty(max(ROWS) * 16384, dtype=torch.bfloat16), torch.empty(largest, dtype=torch.bfloat16)
    seen: set[tuple[Candidate, bool]] = set()
    with collect_kernels() as kernels:
        for n, k in shapes.values():
            rms_norm(x[: 256 * k].view(256, k), x[:k], 1e-6, pdl=True)
            for num_rows in ROWS:
                for candidate in candidates(num_rows=num_rows, n=n, k=k, num_sms=num_sms):
                    if (candidate, n % candidate.block_n == 0) not in seen:
                        seen.add((candidate, n % candidate.block_n == 0))
                        rows = x[: num_rows * k].view(num_rows, k)
                        run(candidate, rows, w[: n * k].view(n, k), None, scratch, pdl=True)
    started_s = time.monotonic()
    last: list[int] = [0]
    Compilation(kernels).wait(lambda done, _total: last.append(done))
    return f"compiled {last[-1]} of {len(kernels)} kernels in {time.monotonic() - started_s:.0f} s"


def table(results: list[dict], *, worth: float = _WORTH) -> str:
    """Rows of kernels/gemm_configs.py: per product, the fastest after a norm (alone, where that was not measured)."""
    lines = []
    for n, k in dict.fromkeys((result["n"], result["k"]) for result in results):
        steps: list[tuple[int, str]] = []
        mine = [result for result in results if (result["n"], result["k"]) == (n, k)]
        for num_rows in sorted({result["rows"] for result in mine}):
            here = [result for result in mine if result["rows"] == num_rows]
            chained = [result for result in here if result["chain"]]
            best = _best_config(chained if len(chained) > 1 else here, worth)
            if steps and steps[-1][1] == best:
                steps.pop()
            steps.append((num_rows, best))
        while steps and steps[-1][1] == "None":
            steps.pop()
        if steps:
            lines.append(f"    ({n}, {k}): ({' '.join(f'({rows}, {config}),' for rows, config in steps)}),")
    return "\n".join(lines)


def _best_config(here: list[dict], worth: float) -> str:
    cublas_us = [result["us"] for result in here if result["family"] == "cuBLAS"]
    ours = [result for result in here if result["family"] in ("gluon", "triton")]
    fastest = min(ours, key=lambda result: result["us"], default=None)
    if fastest is None or not cublas_us or fastest["us"] > worth * cublas_us[0]:
        return "None"
    return str(FAMILIES[fastest["family"]](**fastest["config"]))


def _measure_all(arguments: argparse.Namespace, started_s: float) -> None:
    shapes = {name: shape for name, shape in GEMV_SHAPES.items() if not arguments.shapes or name in arguments.shapes}
    deadline_s = started_s + arguments.seconds
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(compile_all(shapes, num_sms=num_sms), flush=True)
    worker = Worker("cuda")
    sweep = Sweep(shapes, worker=worker, num_sms=num_sms, deadline_s=deadline_s)
    try:
        for num_rows in (*ROWS, *BETWEEN):
            if num_rows in BETWEEN:
                sweep.try_best_of(BETWEEN[num_rows], num_rows)
            else:
                sweep.try_all(num_rows)
            sweep.try_chains(num_rows)
            print(f"{num_rows} rows done at {time.monotonic() - started_s:.0f} s", flush=True)
    finally:
        worker.close()
        arguments.out.write_text(json.dumps(sweep.as_json(), indent=1))
    print(f"{len(sweep.failures)} failed, {sweep.num_left_out} left out")
    seen = Counter((str(failed["feature"]), str(failed["failure"])) for failed in sweep.failures)
    for (feature, failure), number in seen.most_common(12):
        print(f"  {number} × {feature}: {failure[:100]}")
    sweep.print_table()


def main() -> None:
    """Measure, or print the table of what was measured."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gemm-sweep.json"))
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--shapes", nargs="*", choices=list(GEMV_SHAPES))
    parser.add_argument("--table", type=Path, metavar="FILE", help="print rows for kernels/gemm_configs.py, and end")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table(json.loads(arguments.table.read_text())["results"]))
    else:
        _measure_all(arguments, started_s)


if __name__ == "__main__":
    sys.exit(main())
