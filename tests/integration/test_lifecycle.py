"""The daemon's life: the port before the model, drain, deaths of every process, several workers, no orphans."""

import asyncio
import json
import os
import signal

import openai
import pytest

from tests.integration.conftest import needs_proc
from tests.support.daemon import is_alive, wait_for
from tests.support.life_cycle import MODEL, Start, Stream, ends_within, post, ready_status

pytestmark = needs_proc


# rule: Endpoints: `/ready` is 503 with stage and progress until the self-test has given its first token
# rule: Endpoints: The port is bound before the model is loaded
def test_the_port_answers_while_the_model_loads(start: Start) -> None:
    daemon = start()
    early = daemon.get("/ready")
    assert early.status_code == 503
    assert early.json()["stage"] in ("config", "imports", "kernels", "weights", "kv_cache", "graphs", "self_test")
    refused = post(daemon)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert daemon.get("/health").status_code == 200
    assert daemon.metrics()["quire_generation_tokens_total"] == 0
    daemon.wait_ready()
    assert daemon.get("/ready").status_code == 200
    assert post(daemon).status_code == 200
    text = daemon.get("/metrics").text
    assert "vllm:cache_config_info{" in text
    assert 'block_size="' in text


def test_sigterm_lets_streams_finish_and_takes_nothing_new(start: Start) -> None:
    daemon = start("--drain-timeout", "60").wait_ready()
    stream = Stream(daemon, max_tokens=500).wait_started()  # longer than it takes to see that the server drains
    with ends_within(daemon, 60, 0):
        daemon.process.send_signal(signal.SIGTERM)
        wait_for(lambda: ready_status(daemon) == 503, timeout_s=60, what="not ready")
        refused = post(daemon)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        events = stream.wait_end()
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"


# rule: Streams: A failure after the first byte is an event, then `[DONE]`; a stream is never just closed
def test_what_does_not_finish_in_the_drain_time_gets_an_error_event(start: Start) -> None:
    daemon = start("--drain-timeout", "0.5").wait_ready()
    stream = Stream(daemon, max_tokens=4000).wait_started()
    with ends_within(daemon, 20, 0):
        daemon.process.send_signal(signal.SIGINT)
        events = stream.wait_end()
    error = events[-1]["error"]
    assert (error["code"], error["type"]) == ("server_shutting_down", "service_unavailable_error")
    assert "shutting down" in error["message"]
    assert "restart" not in error["message"]


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    daemon = start().wait_ready()
    Stream(daemon, max_tokens=4000).wait_started()
    with ends_within(daemon, 20, 128 + signal.SIGTERM):
        daemon.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in daemon.log, timeout_s=60, what="draining")
        daemon.process.send_signal(signal.SIGTERM)


def test_a_signal_while_the_model_loads_ends_it(start: Start) -> None:
    daemon = start()
    wait_for(lambda: len(daemon.children()) == 2, timeout_s=60, what="children")
    with ends_within(daemon, 20, 0):
        daemon.process.send_signal(signal.SIGTERM)


@pytest.mark.full
def test_a_signal_at_the_moment_of_readiness_drains_several_workers(start: Start) -> None:
    daemon = start("--http-workers", "2")
    wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="ready")
    with ends_within(daemon, 20, 0):
        daemon.process.send_signal(signal.SIGTERM)
    assert "internal error" not in daemon.log


def test_a_killed_launcher_leaves_no_orphans(start: Start) -> None:
    daemon = start("--http-workers", "2").wait_ready()
    Stream(daemon, max_tokens=4000).wait_started()
    with ends_within(daemon, 20, -signal.SIGKILL):
        daemon.process.kill()


# rule: Streams: A failure after the first byte is an event, then `[DONE]`; a stream is never just closed
def test_a_killed_engine_is_told_to_every_stream_and_comes_back(start: Start) -> None:
    daemon = start("--max-replays", "0").wait_ready()
    assert post(daemon).status_code == 200
    tokens = daemon.metrics()["quire_generation_tokens_total"]
    streams = [Stream(daemon, max_tokens=4000).wait_started() for _ in range(3)]
    os.kill(daemon.child("engine.process"), signal.SIGKILL)
    wait_for(lambda: ready_status(daemon) == 503, timeout_s=60, what="not ready")
    assert daemon.get("/health").status_code == 200  # a probe of liveness must not end what heals itself
    for stream in streams:
        assert "error" in stream.wait_end()[-1]
    metrics = daemon.metrics()
    assert metrics["quire_num_requests_running"] == 0
    assert metrics["quire_kv_cache_usage_ratio"] == 0
    assert post(daemon).status_code == 503
    wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="ready again")
    assert post(daemon).status_code == 200
    metrics = daemon.metrics()
    assert metrics["quire_engine_restarts_total"] == 1
    assert metrics["quire_engine_restart_seconds"] >= 0.5  # the first delay
    assert "engine ready again after_s=" in daemon.log
    assert metrics["quire_generation_tokens_total"] >= tokens + 4


def test_a_killed_worker_comes_back(start: Start) -> None:
    daemon = start().wait_ready()
    assert post(daemon).status_code == 200
    tokens = daemon.metrics()["quire_generation_tokens_total"]
    first = daemon.child("server.http.worker")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not is_alive(first), timeout_s=60, what="worker ended")
    wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="ready again")
    assert post(daemon).status_code == 200
    metrics = daemon.metrics()
    assert metrics["quire_generation_tokens_total"] == tokens + 4
    assert (metrics["quire_engine_restarts_total"], metrics["quire_worker_restarts_total"]) == (0, 1)


def test_without_a_worker_the_launcher_answers(start: Start) -> None:
    daemon = start("--http-workers", "2").wait_ready()
    wait_for(lambda: len(daemon.children()) == 3, timeout_s=60, what="both workers")
    assert all(ready_status(daemon) == 200 for _ in range(20))
    children = daemon.children()
    for pid in children:
        if pid != daemon.child("engine.process"):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: sum(map(is_alive, children)) == 1, timeout_s=60, what="no worker")
    refused = post(daemon)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert int(refused.headers["retry-after"]) >= 1
    health = daemon.get("/health")
    assert (health.status_code, health.json()["status"]) in ((200, "worker restarting"), (200, "ok"))
    wait_for(lambda: post(daemon).status_code == 200, timeout_s=60, what="served again")
    wait_for(lambda: daemon.metrics()["quire_worker_restarts_total"] == 2, timeout_s=60, what="both again")


def test_two_workers_share_the_streams_and_count_exactly(start: Start) -> None:
    daemon = start("--http-workers", "2").wait_ready()

    async def ask(client: openai.AsyncOpenAI) -> int:
        stream = await client.completions.create(
            model=MODEL,
            prompt="Count",
            max_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        return [chunk async for chunk in stream][-1].usage.completion_tokens

    async def ten() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{daemon.base_url}/v1", api_key="-", max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for _ in range(10)))

    assert asyncio.run(ten()) == [10] * 10
    for _ in range(6):  # whichever worker answers
        metrics = daemon.metrics()
        for prefix in ("quire_", "vllm:"):
            assert metrics[prefix + "inter_token_latency_seconds_count"] == 90
            assert metrics[prefix + "time_to_first_token_seconds_count"] == 10
            assert metrics[prefix + "e2e_request_latency_seconds_count"] == 10
            assert metrics[prefix + "generation_tokens_total"] == 100
            assert metrics[prefix + "request_queue_time_seconds_count"] == 10
        assert metrics["vllm:request_success_total{finished_reason=length}"] == 10

    streams = [Stream(daemon, max_tokens=100) for _ in range(24)]
    wait_for(lambda: len(daemon.connections("server.http.worker")) == 2, timeout_s=60, what="two workers")
    wait_for(lambda: sum(daemon.connections("server.http.worker")) >= 24, timeout_s=60, what="connections")
    assert all(num > 0 for num in daemon.connections("server.http.worker"))
    for stream in streams:
        events = stream.wait_end()
        assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"


def test_json_log_is_json_on_every_line(start: Start) -> None:
    daemon = start("--log-format", "json")
    wait_for(lambda: "Ready in" in daemon.log, timeout_s=60, what="ready")
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    assert {"time", "level", "process", "logger", "message"} <= set(lines[0])
