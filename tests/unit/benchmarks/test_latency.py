"""The arithmetic of latencies: percentiles as numpy's, TTFT, TPOT and E2EL by hand, goodput from its limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.client_processes import split
from benchmarks.latency import num_good, parse_goodput, percentile, samples, summarise
from benchmarks.load import LoadConfig
from benchmarks.load_client import LoadResult
from benchmarks.load_connection import RequestTiming
from benchmarks.serve import make_report

CONFIG = LoadConfig(host="127.0.0.1", port=1, model="m", num_requests=4, output_len=5)


def timing(*, start_s: float = 100.0, ttft_s: float, gap_s: float, num_tokens: int = 5) -> RequestTiming:
    """Return a finished request whose tokens came one by one, its reply's end 1 ms after the last."""
    last_s = start_s + ttft_s + gap_s * (num_tokens - 1)
    return RequestTiming(
        start_s=start_s,
        first_s=start_s + ttft_s,
        last_s=last_s,
        end_s=last_s + 0.001,
        num_input_tokens=10,
        num_tokens=num_tokens,
        num_chunks=num_tokens,
        has_usage=True,
        itl_s=[gap_s] * (num_tokens - 1),
    )


@given(
    st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=50).map(sorted),
    st.floats(0, 100, allow_subnormal=False),
)
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0.001, 2), st.floats(0.0001, 0.2), st.integers(1, 40)), max_size=20))
def test_goodput_counts_the_requests_that_meet_every_limit(requests: list[tuple[float, float, int]]) -> None:
    timings = [timing(ttft_s=ttft, gap_s=gap, num_tokens=n) for ttft, gap, n in requests]
    expected = sum(ttft <= 0.5 and (n == 1 or gap <= 0.05) for ttft, gap, n in requests)
    near = any(abs(ttft - 0.5) < 1e-9 or abs(gap - 0.05) < 1e-9 for ttft, gap, _ in requests)
    assert near or num_good(timings, {"ttft": 500.0, "tpot": 50.0}) == expected
    assert num_good(timings, {}) == len(timings)
    assert num_good(timings, {"ttft": 1e-6}) == 0


def test_the_four_latencies_by_hand() -> None:
    values = samples([timing(ttft_s=0.2, gap_s=0.01), timing(ttft_s=0.4, gap_s=0.03, num_tokens=1)])
    assert values["ttft_ms"] == pytest.approx([200, 400])
    assert values["tpot_ms"] == pytest.approx([10])  # an answer of one token has no time between tokens
    assert values["itl_ms"] == pytest.approx([10] * 4)
    assert values["e2el_ms"] == pytest.approx([241, 401])
    summary = summarise("ttft_ms", values["ttft_ms"])
    assert summary == pytest.approx({"mean_ttft_ms": 300, "median_ttft_ms": 300, "p99_ttft_ms": 398})
    assert summarise("tpot_ms", []) == {}


def test_a_report_counts_finished_failed_and_unfinished_apart() -> None:
    timings = [
        timing(start_s=100.0, ttft_s=0.1, gap_s=0.1),
        timing(start_s=100.5, ttft_s=0.9, gap_s=0.0),  # the last to end, at 101.401
        RequestTiming(100.0, error_kind="HTTP 429", error="too many"),
        RequestTiming(100.0, error_kind="HTTP 429", error="again too many"),
        RequestTiming(100.0, first_s=100.1),
    ]
    results = [LoadResult(timings, wall_s=2.0, cpu_s=0.5), LoadResult([], wall_s=2.0, cpu_s=1.9)]
    report = make_report(CONFIG, results, goodput={"ttft": 500})
    assert (report["num_completed"], report["num_failed"], report["num_unfinished"]) == (2, 2, 1)
    assert report["errors"] == {"HTTP 429": (2, "too many")}
    assert report["duration_s"] == pytest.approx(1.401)
    assert report["output_throughput_tok_per_s"] == pytest.approx(10 / 1.401)
    assert report["total_throughput_tok_per_s"] == pytest.approx(30 / 1.401)
    assert report["request_goodput_per_s"] == pytest.approx(1 / 1.401)
    assert report["client_cpu_share_max"] == pytest.approx(0.95)


def test_a_report_of_failures_alone_has_no_latencies() -> None:
    failed = RequestTiming(100.0, error_kind="timeout", error="no end within 1 s")
    report = make_report(CONFIG, [LoadResult([failed], wall_s=1.0, cpu_s=0.1)], goodput={})
    assert report["num_completed"] == 0
    assert report["histograms"] == {}
    assert "mean_ttft_ms" not in report


def test_goodput_limits_are_parsed() -> None:
    assert parse_goodput("ttft:500, tpot:50,e2el:1e4") == {"ttft": 500.0, "tpot": 50.0, "e2el": 10_000.0}


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:0", "ttft:-5", "ttft:inf", "ttft:nan", "foo:5", "ttft:5;tpot:5"]
)
def test_wrong_goodput_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not one of ttft, tpot, e2el"):
        parse_goodput(text)


@given(st.integers(1, 500), st.integers(1, 300), st.integers(1, 16), st.sampled_from([0.0, 12.5]))
def test_the_shares_of_client_processes_add_up(requests: int, concurrency: int, processes: int, rate: float) -> None:
    config = LoadConfig(host="h", port=1, model="m", num_requests=requests, concurrency=concurrency, rate_per_s=rate)
    shares = split(config, processes)
    assert 1 <= len(shares) <= processes
    assert sum(share.num_requests for share in shares) == requests
    assert sum(share.rate_per_s for share in shares) == pytest.approx(rate)
    assert rate > 0 or len(shares) > requests or sum(share.concurrency for share in shares) == concurrency
    assert len({share.seed for share in shares}) == len(shares)
