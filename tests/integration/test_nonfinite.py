"""A model that computes NaN for one token: 500 or an error event for requests with it, and nothing for the others."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.daemon import Daemon
from tests.support.nan_checkpoint import NAN_TOKEN, spoiled_demo

NEVER = {"logit_bias": {str(NAN_TOKEN): -100}}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = spoiled_demo(tmp_path_factory.mktemp("nan-demo"))
    flags = ["--device", "cpu", "--served-model-name", "m", "--kv-cache-memory", "64MiB"]
    with Daemon(str(folder), *flags, folder=tmp_path_factory.mktemp("log")) as running:
        yield running.wait_ready()


def complete(daemon: Daemon, prompt: object, path: str = "/v1/completions", **more: object) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    return httpx.post(daemon.base_url + path, json=body, timeout=60)


def texts(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


# rule: Errors: A request whose model output is not finite fails alone
def test_it_fails_alone_with_a_status_or_an_event_and_is_counted(daemon: Daemon) -> None:
    good = [[5 + i, *range(400, 440)] for i in range(4)]
    bad = [5, *range(400, 420), NAN_TOKEN, *range(421, 440)]
    expected = texts(complete(daemon, good, **NEVER))
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(complete, daemon, prompt, **NEVER) for prompt in (*good, bad, bad)]
        *others, first, second = [reply.result() for reply in replies]
    assert [texts(reply)[0] for reply in others] == expected
    for reply in (first, second, complete(daemon, [good[0], bad], **NEVER), complete(daemon, bad, stream=True)):
        assert reply.status_code == 500, reply.text
        error = reply.json()["error"]
        assert (error["code"], error["type"]) == ("model_output_invalid", "server_error")
        assert "not finite" in error["message"]
    events = [
        json.loads(line.removeprefix("data: "))
        for line in complete(daemon, good[0], stream=True, logit_bias={str(NAN_TOKEN): 100}).text.split("\n\n")
        if line.startswith("data: {")
    ]
    assert len(events) > 1
    assert events[0]["choices"]
    assert events[-1]["error"]["code"] == "model_output_invalid"
    assert texts(complete(daemon, good, **NEVER)) == expected
    metrics = daemon.metrics()
    assert metrics["quire_nonfinite_requests_total"] == 5
    assert metrics["quire_requests_failed_total{reason=model_output_invalid}"] == 5
    assert metrics["quire_engine_restarts_total"] == 0
