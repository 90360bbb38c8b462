"""benchmarks.disaggregation: the arrangements that share the GPUs, their loads, what fails, and what is refused."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks import disaggregation
from benchmarks.load import LoadConfig
from benchmarks.load_client import LoadResult
from benchmarks.load_connection import RequestTiming
from benchmarks.report import BenchError


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_arrangement_uses_every_gpu_once(num_ranks):
    found = disaggregation.arrangements(num_ranks)
    assert [each.name for each in found] == ["1p1d", f"TP {2 * num_ranks}", "two servers"]
    for arrangement in found:
        assert sorted(gpu for _, gpus in arrangement.servers for gpu in gpus) == list(range(2 * num_ranks))
        for flags, gpus in arrangement.servers:
            size = int(flags[-1]) if "--tensor-parallel-size" in flags else 1
            assert size * (2 if "--disaggregate" in flags else 1) == len(gpus)


@pytest.mark.parametrize(
    ("flags", "visible", "says"),
    [
        (["--ranks", "0"], "0,1", "--ranks 0 must be at least 1"),
        (["--ranks", "2"], "0,1", "--ranks 2 needs 4 GPUs, and CUDA_VISIBLE_DEVICES names 2"),
        (["--only", "TP 4"], "0,1", "--only TP 4: with --ranks 1 there are 1p1d, TP 2, two servers"),
        (["--processes", "3"], "0,1", "--processes 3 must be even"),
        (["--long-goodput", "ttft"], "0,1", "'ttft' is not one of"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, visible, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["disaggregation", *flags])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(SystemExit):
        disaggregation.main()
    assert says in capsys.readouterr().err


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the benchmark on servers that are made up; → its status, its report, and the loads that were sent, in order.

    Each request has its first token after 100 ms and the next ones after 10, 10 and 40 ms. broken: ports of servers
    that do not start.
    """
    sent: list[list[LoadConfig]] = []

    def start_server(folder, port, flags, *, gpus, log, timeout_s):
        assert 0 < timeout_s <= 75
        if port in broken:
            log.write(b"CUDA out of memory\n")
            raise BenchError("The daemon ended with 1 before it was ready.")
        return port, 12.0

    def run_shares(shares):
        sent.append(list(shares))
        timing = RequestTiming(0.0, 0.1, 0.16, 0.17, num_input_tokens=8, num_tokens=4, itl_s=[0.01, 0.01, 0.04])
        return [LoadResult([timing] * share.num_requests, 2.0, 0.0) for share in shares], False

    broken: set[int] = set()
    monkeypatch.setattr(disaggregation, "start_server", start_server)
    monkeypatch.setattr(disaggregation, "stop_server", lambda port: None)
    monkeypatch.setattr(disaggregation, "model_name", lambda port: "shape")
    monkeypatch.setattr(disaggregation, "_hand_overs", lambda port: [("kv_handover_peers", 1.0)])
    monkeypatch.setattr(disaggregation, "write_model_folder", lambda config, folder: None)
    monkeypatch.setattr(disaggregation, "run_shares", run_shares)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def run(*flags: str, broken_ports: set[int] | None = None):
        broken.update(broken_ports or ())
        path = tmp_path / "report.json"
        monkeypatch.setattr("sys.argv", ["disaggregation", "--settle", "0", "--json", str(path), *flags])
        return disaggregation.main(), json.loads(Path(path).read_text()), sent

    return run


def test_each_arrangement_gets_the_same_requests_at_the_same_times(run):
    status, report, sent = run("--port", "9000")
    assert status == 0
    assert list(report["runs"]) == ["1p1d", "TP 2", "two servers"]
    assert len(sent) == 9  # of each a warm-up, the steady and the full load
    one, split, two = ([[msgspec.structs.replace(share, port=0) for share in load] for load in sent[i : i + 3]]
                       for i in (0, 3, 6))  # fmt: skip
    assert one == split == two
    assert {share.port for load in sent[:6] for share in load} == {9000}
    for load in sent[6:]:
        halves = [
            [(share.input_len, share.num_requests) for share in load if share.port == port] for port in (9000, 9001)
        ]
        assert halves[0] == halves[1] != []
    seeds = [share.seed for load in sent[:3] for share in load]
    assert len(set(seeds)) == len(seeds)  # no prompt comes twice to one server
    steady, full = sent[1], sent[2]
    assert sum(share.rate_per_s for share in full) == pytest.approx(8 * sum(share.rate_per_s for share in steady))


def test_figures_have_latencies_throughput_and_goodput(run):
    _, report, _ = run("--stream-goodput", "ttft:150,tpot:30", "--long-goodput", "ttft:90", "--only", "two servers")
    figures = report["runs"]["two servers"]["steady"]
    streams, longs = figures["streams"], figures["longs"]
    assert (streams["num_completed"], longs["num_completed"]) == (200, 30)
    assert (streams["num_good"], longs["num_good"]) == (200, 0)
    assert streams["good_per_s"] == 100.0
    assert (streams["median_itl_ms"], streams["max_longest_itl_ms"]) == pytest.approx((10.0, 40.0))
    assert longs["median_ttft_ms"] == pytest.approx(100.0)
    assert figures["output_tok_per_s"] == 230 * 4 / 2.0
    assert figures["total_tok_per_s"] == 230 * 12 / 2.0


def test_an_arrangement_that_does_not_start_tells_why_and_the_others_are_measured(run, capsys):
    status, report, _ = run("--port", "9000", broken_ports={9001})
    assert status == 1
    assert list(report["runs"]) == ["1p1d", "TP 2"]
    assert report["failed"] == {"two servers": "The daemon ended with 1 before it was ready."}
    printed = capsys.readouterr().out
    assert "two servers, server 1: CUDA out of memory" in printed
    assert "two servers: The daemon ended with 1" in printed


def test_an_arrangement_for_which_no_time_is_left_is_left_out(run):
    status, report, _ = run("--max-seconds", "60")
    assert (status, report["runs"]) == (1, {})
    assert report["left_out"] == ["1p1d", "TP 2", "two servers"]
