"""`quire top` without a server: metrics read and subtracted, percentiles, lines that fit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface.metrics import Metrics
from server.commands.server_target import error_message
from server.commands.top.render import snapshot_lines
from server.commands.top.sampling import Histogram, KvRow, Snapshot, activity, quantile, read_metrics
from server.launcher.metrics_registry import MetricsRegistry


@pytest.fixture
def registry():
    page = MetricsRegistry(model_name="m", version="1.2")
    page.set_cache_config(block_size=16, num_blocks=1001)
    return page


def record(registry, *, tokens=10, ttft=0.04, n=1, running=2, used=250):
    metrics = Metrics()
    metrics.count("requests_finished_total", n, label="stop")
    metrics.count("requests_finished_total", n, label="length")
    metrics.count("generation_tokens_total", tokens)
    metrics.count("prefix_cache_queries_total", 100)
    metrics.count("prefix_cache_hits_total", 75)
    metrics.observe("time_to_first_token_seconds", ttft, n)
    for name, value in (("num_requests_running", running), ("kv_cache_blocks_used", used)):
        metrics.gauge(name, value)
    metrics.gauge("kv_cache_blocks_total", 1000)
    metrics.gauge("kv_cache_usage_ratio", used / 1000)
    registry.merge(metrics.drain())


def read(registry, time_s, *, only=""):
    page = registry.render().decode()
    lines = [line for line in page.splitlines() if not only or only in line]
    return read_metrics("\n".join(["", *lines, ""]), time_s=time_s)


def test_what_happened_between_two_looks_is_their_difference(registry):
    record(registry, tokens=10, ttft=0.04)
    first = read(registry, 100.0)
    record(registry, tokens=30, ttft=0.15, n=4)
    second = read(registry, 102.0)
    recent, total = activity(second, first), activity(second, None)
    assert (recent.seconds, recent.num_finished, recent.generated_tokens) == (2.0, 8, 30)
    assert (total.seconds, total.num_finished, total.generated_tokens) == (None, 10, 40)
    assert (recent.ttft_s.count, total.ttft_s.count, recent.itl_s.count) == (4, 5, 0)
    assert recent.ttft_s.p50 == pytest.approx(0.15)  # the middle of the bucket from 0.1 to 0.2
    assert recent.itl_s.p50 is None
    assert recent.prefix_hit_rate == 0.75
    assert (second.model, second.version, second.block_size) == ("m", "1.2", 16)


def test_a_server_that_was_restarted_meanwhile_is_shown_since_its_start(registry):
    record(registry, tokens=50)
    before = read(registry, 100.0)
    fresh = MetricsRegistry(model_name="m", version="1.2")
    record(fresh, tokens=7)
    recent = activity(read(fresh, 101.0), before)
    assert (recent.seconds, recent.generated_tokens) == (None, 7)


def test_a_server_with_the_names_of_vllm_alone_is_read_as_well(registry):
    record(registry)
    reading = read(registry, 1.0, only="vllm:")
    assert reading.values["num_requests_running"] == 2
    assert reading.values["generation_tokens_total"] == 10
    assert reading.values["requests_finished_total"] == 2
    assert activity(reading, None).ttft_s.count == 1
    assert reading.block_size == 16


@pytest.mark.parametrize("page", ["", "up 1\n", "<html>", "quire_x{ 1"])
def test_a_page_of_something_else_is_refused(page):
    with pytest.raises(ValueError, match=r".+"):
        read_metrics(page, time_s=0.0)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_that_its_rank_falls_into(counts, share):
    bounds = [1.0, 2.0, 4.0, math.inf]
    value = quantile(Histogram(bounds, [float(count) for count in counts]), share)
    if sum(counts) == 0:
        assert value is None
        return
    edges = [edge for i, count in enumerate(counts) for edge in [(0.0, *bounds)[i]] * count]
    lower = edges[max(0, math.ceil(share * sum(counts)) - 1)]
    upper = {0.0: 1.0, 1.0: 2.0, 2.0: 4.0, 4.0: 4.0}[lower]
    assert lower <= value <= upper


def snapshot(registry, requests=None, **changes):
    reading = read(registry, 10.0)
    older = read(registry, 5.0)
    values = {
        "url": "http://127.0.0.1:8000", "time": 0.0, "model": "m" * 100, "version": "1.2", "num_running": 2,
        "num_waiting": 12345, "kv_usage": 0.25, "kv_blocks_used": 25_000, "kv_blocks_total": 100_000, "block_size": 16,
        "recent": activity(reading, older), "total": activity(reading, None), "requests": requests, "num_unlisted": 0,
    }  # fmt: skip
    return Snapshot(**(values | changes))


def test_on_50_columns_every_figure_is_shown_and_no_line_is_cut(registry):
    record(registry, tokens=10**9, n=10**8)
    rows = [KvRow(f"chatcmpl-{i:032x}", "running", num_blocks=9, num_tokens=131_072, num_computed_tokens=131_071,
                  num_hit_tokens=5, age_s=12.0, num_preemptions=0) for i in range(3)]  # fmt: skip
    shot = snapshot(registry, rows)
    lines = snapshot_lines(shot, width=50, height=None)
    assert max(map(len, lines)) <= 50
    everything = [line.rstrip() for line in snapshot_lines(shot, width=10**6, height=None)]
    narrow = "\n".join(lines[1:])
    for line in everything[2:7] + everything[9:13]:
        missing = [word for word in line.split() if word not in narrow.split()]
        assert missing == [], line
    assert sum("131,071/131,072" in line and line.endswith("12.0 s") for line in lines) == 3
    assert len(snapshot_lines(shot, width=50, height=24)) <= 24


def test_lines_fit_80_columns_and_the_height_that_is_there(registry):
    record(registry, tokens=10**9, n=10**8)
    rows = [
        KvRow(f"chatcmpl-{i:032x}", "preempted", num_blocks=99_999, num_tokens=131_072, num_computed_tokens=131_071,
              num_hit_tokens=131_000, age_s=86_000.0, num_preemptions=100)
        for i in range(500)
    ]  # fmt: skip
    lines = snapshot_lines(snapshot(registry, rows, num_unlisted=3), width=80, height=24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    shown = sum(line.startswith("chatcmpl-") for line in lines)
    assert shown >= 5
    assert lines[-1] == f"… {500 - shown + 3} more"
    assert "25,000 of 100,000 blocks of 16 tokens" in "\n".join(lines)
    assert "[████············]  25.0%" in "\n".join(lines)
    assert "131,071/131,072  131,000  23.9 h" in "\n".join(lines)
    assert len(snapshot_lines(snapshot(registry, rows), width=80, height=None)) > 500


def test_what_a_server_says_can_rewrite_no_screen(registry):
    record(registry)
    evil = "\x1b[2J\x07\x9b\r\nx"
    rows = [KvRow(evil, evil)]
    lines = snapshot_lines(snapshot(registry, rows, model=evil, version=evil, url="u"), width=200, height=None)
    assert all(character.isprintable() for line in lines for character in line)
    assert lines[0].startswith("[2J x · [2J x · u")


@pytest.mark.parametrize("body", ['{"error": {"message": "%s"}}', '{"error": "%s"}', "%s"])
def test_an_error_of_a_server_is_one_printable_line(body):
    evil = "\\u001b[2J\\u0007a\\nb" if "error" in body else "\x1b[2J\x07a\nb"
    message = error_message(500, (body % evil).encode())
    assert message.isprintable()
    assert message.endswith("[2Ja b")


def test_without_a_table_of_requests_there_is_none(registry):
    record(registry)
    assert not any("REQUEST" in line for line in snapshot_lines(snapshot(registry), width=80, height=24))
    assert snapshot_lines(snapshot(registry, []), width=80, height=24)[-1] == "none"
