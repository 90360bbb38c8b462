"""`quire bench` as people run it: real processes against a real daemon, a failing fake server, and the demo model."""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.daemon import ROOT, Daemon, wait_for
from tests.support.fake_openai import fake_openai

LOAD = ("--num-requests", "12", "--input-len", "16", "--output-len", "8")
TIMEOUT_S = 120


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `quire bench` to its end."""
    command = [sys.executable, "-m", "server", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_closed_loop_measures_every_request(daemon: Daemon, tmp_path: Path) -> None:
    report_path, plot_path = tmp_path / "new.json", tmp_path / "curves.png"
    outputs = ("--json", str(report_path), "--plot", str(plot_path), "--vocab-size", "2000")
    goodput = ("--goodput", "ttft:60000,tpot:60000,e2el:60000")
    result = bench(
        "serve", "--url", daemon.base_url, "--concurrency", "4", "--processes", "2", *LOAD, *outputs, *goodput
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(report_path.read_text())
    assert (report["num_completed"], report["num_failed"], report["num_client_processes"]) == (12, 0, 2)
    assert (report["num_input_tokens"], report["num_output_tokens"]) == (12 * 16, 12 * 8)
    assert report["request_goodput_per_s"] == report["request_throughput_per_s"]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert 0 <= report[f"median_{name}"] <= report[f"p99_{name}"]
        num_values = sum(report["histograms"][name]["counts"])
        assert 12 <= num_values <= 12 * 7 if name == "itl_ms" else num_values == 12
    assert plot_path.read_bytes().startswith(b"\x89PNG")
    assert "goodput" in result.stdout
    assert "peak VRAM" in result.stdout


@pytest.mark.full
def test_a_sweep_is_drawn_saved_and_drawn_again_from_its_file(daemon: Daemon, tmp_path: Path) -> None:
    sweep, page, again, picture = (tmp_path / name for name in ("sweep.json", "page.html", "again.html", "again.png"))
    load = ("serve", "--url", daemon.base_url, *LOAD, "--concurrency", "1,4", "--api-key", "sk-secret")
    result = bench(*load, "--json", str(sweep), "--html", str(page))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("12 completed, 0 failed") == 2
    assert "at once  tok/s  TTFT p50" in result.stdout
    report = json.loads(sweep.read_text())
    assert [run["load"]["concurrency"] for run in report["sweep"]] == [1, 4]
    assert len({run["load"]["seed"] for run in report["sweep"]}) == 2
    assert report["server"]["device"] == "cpu"
    assert report["server"]["torch"]
    for text in (sweep.read_text(), page.read_text()):
        assert "--concurrency 1,4 --api-key HIDDEN" in text
        assert "sk-secret" not in text
    assert all(title in page.read_text() for title in ("Throughput and latency", "Latencies", report["host"]["cpu"]))
    result = bench("report", str(sweep), str(sweep), "--html", str(again), "--png", str(picture))
    assert (result.returncode, result.stderr) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Change from sweep (1) to sweep (2)" in again.read_text()
    result = bench(*load, "--compare", str(sweep), "--concurrency", "4", "--html", str(page))
    assert result.returncode == 0, result.stderr
    assert "c4 median_ttft_ms" in result.stdout
    assert "Change from before to now" in page.read_text()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_workload_is_sent_to_a_server(daemon: Daemon, tmp_path: Path, endpoint: str) -> None:
    report_path, page = tmp_path / "eight.json", tmp_path / "eight.html"
    load = ("--workload", "eight", "--vocab-size", "2000", "--endpoint", endpoint, "--processes", "2")
    result = bench("serve", "--url", daemon.base_url, *load, "--json", str(report_path), "--html", str(page))
    assert result.returncode == 0, result.stderr
    assert "eight: 8 requests, 8 at a time, at most 128" in result.stderr
    report = json.loads(report_path.read_text())
    assert (report["num_completed"], report["num_output_tokens"], report["load"]["workload"]) == (8, 8 * 32, "eight")
    if endpoint == "completions":
        assert report["num_input_tokens"] == 8 * 128
    assert "workload eight" in page.read_text()


@pytest.mark.full
def test_poisson_arrivals_and_a_comparison_with_an_earlier_run(daemon: Daemon, tmp_path: Path) -> None:
    old_path, plot_path = tmp_path / "old.json", tmp_path / "curves.svg"
    load = ("serve", "--url", f"{daemon.base_url}/v1", "--rate", "40", *LOAD)
    assert bench(*load, "--json", str(old_path)).returncode == 0
    result = bench(*load, "--compare", str(old_path), "--plot", str(plot_path), "--endpoint", "chat")
    assert result.returncode == 0, result.stderr
    assert "(Poisson)" in result.stderr
    assert "median_ttft_ms" in result.stdout
    assert "not the same load.path: /v1/completions → /v1/chat/completions" in result.stdout
    assert ET.parse(plot_path).getroot().tag.endswith("svg")


def test_ctrl_c_shows_what_was_measured_until_then(daemon: Daemon) -> None:
    load = ("serve", "--url", daemon.base_url, "--concurrency", "4", "--processes", "2", "--num-requests", "100000")
    command = [sys.executable, "-m", "server", "bench", *load, "--input-len", "8", "--output-len", "8"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before = daemon.metrics()["quire_requests_finished_total{finished_reason=length}"]
    wait_for(
        lambda: daemon.metrics()["quire_requests_finished_total{finished_reason=length}"] > before + 10,
        timeout_s=TIMEOUT_S,
        what="ten requests",
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "Interrupted" in out
    assert "TTFT" in out
    assert "Traceback" not in err


def test_chunks_of_several_tokens_are_counted_by_the_usage(tmp_path: Path) -> None:
    with fake_openai("chunky", prefix="/deep/base") as fake:
        result = bench("serve", "--url", f"{fake.url}/deep/base", *LOAD, "--json", str(tmp_path / "report.json"))
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["num_output_tokens"], report["tokens_per_chunk"]) == (12 * 8, 4.0)
    assert "A chunk holds 4.0 tokens on average" in result.stdout
    assert all(isinstance(body["prompt"], list) for _, body in fake.requests)


def test_without_usage_chunks_are_counted_and_that_is_said() -> None:
    with fake_openai("no-usage") as fake:
        result = bench("serve", "--url", fake.url, *LOAD, "--endpoint", "chat")
    assert result.returncode == 0, result.stderr
    assert "chunks are counted as tokens" in result.stdout
    assert fake.requests[0][1]["messages"][0]["content"].count(" ") == 15


def test_a_server_without_token_ids_and_ignore_eos_gets_neither() -> None:
    with fake_openai("only-text") as fake:
        refused = bench("serve", "--url", fake.url, *LOAD)
        taken = bench("serve", "--url", fake.url, *LOAD, "--no-ignore-eos")
    assert refused.returncode == 1
    assert "HTTP 422" in refused.stderr
    assert "--no-ignore-eos" in refused.stderr
    assert taken.returncode == 0, taken.stderr
    assert fake.requests[-1][1].keys().isdisjoint({"ignore_eos"})
    assert isinstance(fake.requests[-1][1]["prompt"], str)


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ("error", "12 × error in the stream: the engine died"),
        ("cut", "12 × connection closed: the connection closed before the reply's end"),
        ("overloaded", "12 × HTTP 429: queue is full"),
    ],
)
def test_failed_requests_are_counted_by_kind(behaviour: str, kind: str) -> None:
    with fake_openai(behaviour) as fake:
        result = bench("serve", "--url", fake.url, *LOAD)
    assert result.returncode == 1
    assert "0 completed, 12 failed" in result.stdout
    assert kind in result.stdout
    assert "Traceback" not in result.stderr


def test_a_server_that_wants_a_key_is_one_sentence() -> None:
    with fake_openai("unauthorized") as fake:
        result = bench("serve", "--url", fake.url, *LOAD)
    assert result.returncode == 1
    assert "--api-key" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_dead_server_is_one_sentence() -> None:
    result = bench("serve", "--url", "http://127.0.0.1:9", *LOAD)
    assert result.returncode == 1
    assert result.stderr.startswith("quire: error: No server answers at http://127.0.0.1:9/v1/models")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--rate", "0"), "--rate"),
        (("serve", "--rate", "1", "--concurrency", "2"), "not allowed with"),
        (("serve", "--concurrency", "1,0"), "'0' is not a whole number from 1 to 65,536"),
        (("serve", "--concurrency", "1,,8"), "'' is not a whole number"),
        (("serve", "--concurrency", "8,8"), "'8,8' names a number twice"),
        (("serve", "--html", "x.png"), "does not end with .html"),
        (("report", "x.json"), "Say where to draw: --html FILE, --png FILE or both"),
        (("report", "/no/such.json", "--png", "x.png"), "/no/such.json cannot be read"),
        (("serve", "--workload", "nope"), "There is no workload 'nope': choose from single"),
        (("serve", "--workload", "long", "--input-len", "9"), "long decides that itself: leave --input-len out"),
        (("serve", "--workload", "agent", "--rate", "3"), "workload agent decides that itself: leave --rate out"),
        (("serve", "--goodput", "ttft"), "'ttft' is not one of ttft, tpot, e2el"),
        (("serve", "--plot", "x.pdf"), "does not end with .png or .svg"),
        (("serve", "--url", "ftp://host"), "is not a URL"),
        (("serve", "--compare", "/no/such.json"), "--compare /no/such.json cannot be read"),
        (("serve", "--json", "/no/such/folder/x.json"), "--json /no/such/folder/x.json: its folder does not exist"),
        (("offline", "nope"), "There is no workload 'nope': choose from single"),
        (("offline", "single", "--shape", "nope"), "choose from deepseek-v2-lite, deepseek-v3-8-layers-fp8,"),
        (("kernels", "--lengths", "0"), "--lengths"),
    ],
)
@pytest.mark.table(most=3)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    result = bench(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_offline_runs_a_workload_on_the_demo_model(tmp_path: Path) -> None:
    report_path = tmp_path / "offline.json"
    arguments = ("offline", "eight", "--device", "cpu", "--runs", "1")
    result = bench(*arguments, "--json", str(report_path), "--html", str(tmp_path / "page.html"))
    assert result.returncode == 0, result.stderr
    assert "Tokens out per second" in (tmp_path / "page.html").read_text()
    report = json.loads(report_path.read_text())["workloads"]["eight"]
    assert (report["num_input_tokens"], report["num_output_tokens"], report["num_steps"]) == (8 * 128, 8 * 32, 34)
    assert "peak VRAM not available: no CUDA device" in result.stdout


def test_offline_says_which_context_a_workload_needs() -> None:
    result = bench("offline", "prefill", "--device", "cpu")
    assert result.returncode == 1
    needs = "Workload prefill needs a context of 4,097 tokens, and this model has 4,096 here: choose a model"
    assert needs in result.stderr


@pytest.mark.full
def test_kernels_run_on_the_cpu(tmp_path: Path) -> None:
    report_path, plot_path = tmp_path / "kernels.json", tmp_path / "kernels.png"
    sizes = ("--lengths", "32,64", "--batches", "1,2", "--contexts", "32")
    outputs = ("--json", str(report_path), "--plot", str(plot_path), "--html", str(tmp_path / "page.html"))
    result = bench("kernels", "--device", "cpu", *sizes, *outputs)
    assert result.returncode == 0, result.stderr
    report = json.loads(report_path.read_text())
    assert {cell["case"] for cell in report["results"]} == {
        "prefill 32",
        "prefill 64",
        "decode 1 × 32",
        "decode 2 × 32",
    }
    assert all((cell["us"] is None) == bool(cell["skipped"]) for cell in report["results"])
    assert plot_path.read_bytes().startswith(b"\x89PNG")
    assert "Prefill of one prompt" in (tmp_path / "page.html").read_text()
    assert "small sizes" in result.stderr
    assert "flash-attn: it needs a CUDA device" in result.stdout


def test_steps_of_the_demo_model_are_measured_and_planned_with(tmp_path: Path) -> None:
    steps = tmp_path / "steps.json"
    limits = ("--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--context", "16", "--num-steps", "3")
    result = bench("steps", "--device", "cpu", *limits, "--json", str(steps))
    assert result.returncode == 0, result.stderr
    times = json.loads(steps.read_text())
    assert [rows for rows, _ in times["decode_s"]] == [1, 2, 3]
    assert [tokens for tokens, _ in times["prompt_s"]] == [31, 63]
    assert all(seconds > 0 for _, seconds in times["decode_s"])
    result = bench("plan", "--steps", str(steps), "--concurrency", "4", "--num-requests", "8", "--output-len", "8")
    assert result.returncode == 0, result.stderr
    assert "quire-demo on 1" in result.stdout


@pytest.mark.full
def test_steps_end_in_time_and_say_what_was_left_out(tmp_path: Path) -> None:
    steps = tmp_path / "steps.json"
    limits = ("--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--num-steps", "3")
    result = bench("steps", "--device", "cpu", *limits, "--max-seconds", "0.01", "--json", str(steps))
    assert result.returncode == 0, result.stderr
    times = json.loads(steps.read_text())
    assert [rows for rows, _ in times["decode_s"]] == [1]
    assert [tokens for tokens, _ in times["prompt_s"]] == [31]
    assert times["context_s_per_token"] == 0
    said = result.stderr.splitlines()
    assert "decoding rows: 1, context 512 …" in said
    assert "left out, for want of --max-seconds: 2 decoding rows and more" in said
    assert "left out, for want of --max-seconds: steps of 63 prompt tokens and more" in said
    assert any(line.startswith("what context costs was not measured") for line in said)
    result = bench("plan", "--steps", str(steps), "--concurrency", "2", "--num-requests", "4", "--output-len", "8")
    assert result.returncode == 0, result.stderr
