"""Two reports side by side: which way each figure moved, and what makes them incomparable."""

import re

import pytest

from benchmarks.compare import compare
from benchmarks.report import BenchError

SERVE = {
    "date": "2026-11-20",
    "load": {"concurrency": 8, "port": 8000},
    "output_throughput_tok_per_s": 1000.0,
    "mean_ttft_ms": 50.0,
    "p99_itl_ms": 10.0,
    "num_failed": 0,
}


def verdicts(text: str) -> dict[str, str]:
    """Return figure → verdict."""
    return {
        line.split("  ")[0]: line.split()[-1]
        for line in text.splitlines()
        if line.endswith(("better", "worse", "same"))
    }


def test_more_throughput_and_less_latency_are_better() -> None:
    new = SERVE | {"output_throughput_tok_per_s": 1100.0, "mean_ttft_ms": 60.0, "p99_itl_ms": 10.05, "num_failed": 2}
    text = compare(SERVE, new)
    assert verdicts(text) == {
        "output_throughput_tok_per_s": "better",
        "mean_ttft_ms": "worse",
        "p99_itl_ms": "same",
        "num_failed": "worse",
    }
    assert "+10.0%" in text
    assert "not the same" not in text


def test_a_load_is_compared_with_its_own_in_a_sweep() -> None:
    runs = [SERVE | {"load": {"concurrency": n, "rate_per_s": 0.0, "seed": n}} for n in (1, 8)]
    text = compare({"date": "2026-11-20", "sweep": runs}, runs[1] | {"mean_ttft_ms": 25.0})
    assert verdicts(text)["c8 mean_ttft_ms"] == "better"
    assert "c1 " not in text
    assert "not the same" not in text
    other = {"sweep": [runs[1] | {"load": runs[1]["load"] | {"seed": 9}}]}
    assert "not the same c8 load.seed: 8 → 9" in compare({"sweep": runs}, other)


def test_other_conditions_are_named_and_addresses_are_not() -> None:
    text = compare(SERVE, SERVE | {"load": {"concurrency": 64, "port": 9000}})
    assert re.search(r"not the same load\.concurrency: 8 → 64", text)
    assert "port" not in text


def test_workloads_and_kernels_are_compared_case_by_case() -> None:
    result = {"output_tok_per_s": 100.0, "input_tok_per_s": 10.0, "ms_per_step": 2.0}
    old = {"workloads": {"single": result, "batch8": result}}
    text = compare(old, {"workloads": {"single": result | {"ms_per_step": 1.0}}})
    assert verdicts(text)["single ms_per_step"] == "better"
    assert "batch8" not in text
    cell = {"case": "prefill 128", "implementation": "triton", "us": 10.0}
    text = compare(
        {"results": [cell]}, {"results": [cell | {"us": 20.0}, cell | {"implementation": "SDPA", "us": None}]}
    )
    assert verdicts(text) == {"prefill 128 triton us": "worse"}


def test_reports_of_different_commands_cannot_be_compared() -> None:
    with pytest.raises(BenchError, match="no figure in common"):
        compare(SERVE, {"workloads": {}})
