"""Buckets of latencies: nothing is lost, what is shown is where it was measured, and a file stays small."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.histogram import FIRST_MS, NUM_BUCKETS, Histogram, count, to_bars

latencies = st.lists(st.floats(0, 1e8), min_size=1, max_size=200)


@given(latencies)
def test_every_value_is_counted_and_the_size_is_bounded(values: list[float]) -> None:
    histogram = count(values)
    assert sum(histogram.counts) == len(values)
    assert histogram.counts[0] > 0 < histogram.counts[-1]
    assert histogram.first + len(histogram.counts) <= NUM_BUCKETS
    assert msgspec.convert(msgspec.to_builtins(histogram), Histogram) == histogram


@given(st.floats(FIRST_MS * 1.01, 9e6))
def test_a_value_lies_in_its_bar(value: float) -> None:
    bars = to_bars([count([value])], max_bars=10)
    assert bars.shares == [[100.0]]
    low, high = bars.edges_ms
    assert low * 0.9999 <= value <= high * 1.0001
    assert high / low == pytest.approx(1.0233, abs=1e-3)


@given(st.lists(latencies, min_size=1, max_size=4), st.integers(1, 50))
def test_bars_of_several_runs_share_their_edges(runs: list[list[float]], max_bars: int) -> None:
    bars = to_bars([count(values) for values in runs], max_bars=max_bars)
    assert 1 <= len(bars.edges_ms) - 1 <= max_bars
    assert bars.edges_ms == sorted(bars.edges_ms)
    assert [sum(shares) for shares in bars.shares] == pytest.approx([100.0] * len(runs))
    assert {len(shares) for shares in bars.shares} == {len(bars.edges_ms) - 1}


def test_a_few_chunks_that_came_together_do_not_take_the_axis() -> None:
    bars = to_bars([count([0.0, *([10.0] * 996), 12.0, 300.0, 300.0])], max_bars=40)
    assert bars.edges_ms[0] == pytest.approx(10, rel=0.03)
    assert bars.edges_ms[-1] >= 300
    assert sum(bars.shares[0]) == pytest.approx(100)


def test_nothing_is_no_histogram() -> None:
    assert count([]) is None
