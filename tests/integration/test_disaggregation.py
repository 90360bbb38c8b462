"""A prefill engine and a decode engine in real processes: answers as of one engine, also when one is killed."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx
import pytest

from tests.integration.conftest import needs_proc
from tests.support.daemon import Daemon, command_line, wait_for
from tests.support.hand_overs import assert_handed_over, hand_overs, wait_joined

pytestmark = needs_proc
FLAGS = (
    "--disaggregate",
    "1p1d",
    "--disaggregate-from",
    "16",
    "--kv-host-memory",
    "32MiB",
    "--kv-cache-memory",
    "64MiB",
)
TEXT = "The quire is a gathering of leaves, folded once and sewn through the fold. "
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}
BODIES = {
    "greedy": {"max_tokens": 24, "temperature": 0},
    "seeded": {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalties": {"max_tokens": 24, "temperature": 0.7, "seed": 2, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "logprobs": {"max_tokens": 12, "temperature": 0.5, "seed": 4, "logprobs": 3, "ignore_eos": True},
    "prompt_logprobs": {"max_tokens": 4, "temperature": 0, "prompt_logprobs": 1},
    "two": {"max_tokens": 16, "temperature": 1.0, "seed": 5, "n": 2},
    "grammar": {
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 6,
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
    },
    "choice": {"max_tokens": 8, "temperature": 0, "structured_outputs": {"choice": ["a", "quire"]}},
    "stop": {"max_tokens": 30, "temperature": 0, "stop": ["e"]},
    "single": {"max_tokens": 1, "temperature": 0},
    "bias": {"max_tokens": 6, "temperature": 0, "min_tokens": 3, "logit_bias": {"40": 5}},
}


def ask(daemon: Daemon, prompt: str, **fields: object) -> list[dict]:
    body = {"model": "quire-demo", "prompt": prompt, **fields}
    reply = httpx.post(f"{daemon.base_url}/v1/completions", json=body, timeout=180)
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    for choice in choices:  # their last bits depend on how a token is computed: in a chunk, or by itself
        logprobs = choice["logprobs"] or {"token_logprobs": []}
        logprobs["token_logprobs"] = [round(number, 3) + 0.0 for number in logprobs["token_logprobs"]]
        logprobs.pop("top_logprobs", None)
    return choices


class Asking:
    """Requests that are asked at once, each in a thread, and their answers. Life: __init__ → start, join → answers."""

    def __init__(self, daemon: Daemon, prompts: list[str], **fields: object) -> None:
        self.answers: dict[str, list[dict]] = {}
        self._fields = fields
        self._threads = [threading.Thread(target=self._ask, args=(daemon, prompt)) for prompt in prompts]
        self._prompts = prompts

    def start(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def _ask(self, daemon: Daemon, prompt: str) -> None:
        self.answers[prompt] = ask(daemon, prompt, **self._fields)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def assert_as_of(self, daemon: Daemon) -> None:
        """Wait, and compare the texts with those of another daemon, asked one by one."""
        self.join()
        for prompt in self._prompts:
            assert self.answers[prompt][0]["text"] == ask(daemon, prompt, **self._fields)[0]["text"]


def pid_of(daemon: Daemon, name: str) -> int:
    """Return the process of an engine, once it runs."""
    found: list[int] = []

    def runs() -> bool:
        engines = daemon.running("engine.process")
        found[:] = [pid for pid in engines if any(word.endswith(f"/{name}.json") for word in command_line(pid))]
        return bool(found)

    wait_for(runs, timeout_s=60, what=name)
    return found[0]


@pytest.fixture
def pair(daemon_with: Callable[..., Daemon]) -> Daemon:
    return wait_joined(daemon_with(*FLAGS, "--http-workers", "1"))


@pytest.fixture
def own(start: Callable[..., Daemon]) -> Daemon:
    return wait_joined(start(*FLAGS, "--http-workers", "1").wait_ready())


@pytest.mark.parametrize("name", BODIES)
def test_answers_are_those_of_one_engine(name: str, pair: Daemon, daemon: Daemon) -> None:
    prompt = f"{name}: " + TEXT * 6
    assert ask(pair, prompt, **BODIES[name]) == ask(daemon, prompt, **BODIES[name])


def test_a_stream_is_one_stream(pair: Daemon, daemon: Daemon) -> None:
    answers = []
    for served in (pair, daemon):
        body = {"messages": [{"role": "user", "content": TEXT * 5}], "stream": True, "temperature": 0, "max_tokens": 20}
        with httpx.stream("POST", f"{served.base_url}/v1/chat/completions", json=body, timeout=60) as reply:
            chunks = [json.loads(line[6:]) for line in reply.iter_lines() if '"delta"' in line]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert choices[0]["delta"]["role"] == "assistant"
        assert {tuple(choice) for choice in choices} == {("index", "delta", "logprobs", "finish_reason")}
        # tokens that come at once share a chunk
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        answers.append((text, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]))
    assert answers[0] == answers[1]


def test_metrics_and_health_tell_both_sides(pair: Daemon) -> None:
    before, before_results = pair.metrics(), hand_overs(pair)
    ask(pair, "metrics: " + TEXT * 8, max_tokens=4, temperature=0)
    assert_handed_over(pair, 1, before=before_results)
    after = pair.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("quire_kv_handover_blocks_total{event=offered}") > 4
    assert grown("quire_kv_handover_bytes_total") > 0
    assert (
        sum(grown(f"quire_requests_finished_total{{finished_reason={reason}}}") for reason in ("stop", "length")) == 1
    )
    assert after["quire_kv_handover_peers"] == 1
    assert 0 <= after["quire_kv_cache_usage_ratio"] <= 1
    assert pair.get("/health").json() == {"status": "ok", "engines": {"prefill-0": "ready", "decode-0": "ready"}}
    shown = {name: pair.get(f"/kv/snapshot{query}").json() for name, query in (
        ("", ""), ("decode-0", "?engine=decode-0"), ("prefill-0", "?engine=prefill-0"),
    )}  # fmt: skip
    assert [state["engine"] for state in shown.values()] == ["decode-0", "decode-0", "prefill-0"]
    assert shown[""]["engines"] == ["prefill-0", "decode-0"]
    assert pair.get("/kv/snapshot?engine=decode-7").status_code == 400


def test_short_prompts_are_computed_where_they_are_decoded(pair: Daemon) -> None:
    name = "quire_kv_handover_blocks_total{event=offered}"
    before = pair.metrics()[name]
    assert ask(pair, "Hello", max_tokens=4, temperature=0)
    assert pair.metrics()[name] == before


@pytest.mark.full
def test_a_killed_prefill_engine_costs_no_request(own: Daemon, daemon: Daemon) -> None:
    prompts = [f"{number}: " + TEXT * 40 for number in range(6)]
    killed = pid_of(own, "prefill-0")
    asking = Asking(own, prompts, max_tokens=24, temperature=0).start()
    wait_for(lambda: own.metrics()["quire_kv_handover_blocks_total{event=offered}"] > 20, timeout_s=30, what="offers")
    os.kill(killed, signal.SIGKILL)
    asking.join()
    for prompt in prompts:
        assert asking.answers[prompt] == ask(daemon, prompt, max_tokens=24, temperature=0)
    assert own.get("/ready").status_code == 200
    assert ask(own, "while it is gone, perhaps: " + TEXT * 6, max_tokens=4, temperature=0)
    assert sum(own.metrics()[f"quire_prefill_fallbacks_total{{reason={reason}}}"] for reason in ("died", "missing"))
    wait_for(
        lambda: own.get("/health").json()["engines"]["prefill-0"] == "ready", timeout_s=90, what="its next process"
    )
    wait_joined(own)
    before = hand_overs(own)
    ask(own, "after its return: " + TEXT * 6, max_tokens=4, temperature=0)
    assert_handed_over(own, 1, before=before)


@pytest.mark.full
def test_a_killed_decode_engine_comes_back_and_is_joined_again(own: Daemon, daemon: Daemon) -> None:
    os.kill(pid_of(own, "decode-0"), signal.SIGKILL)
    wait_for(lambda: own.get("/ready").status_code != 200, timeout_s=30, what="its loss")
    assert own.get("/health").json()["status"] == "engine restarting"
    wait_for(lambda: own.get("/ready").status_code == 200, timeout_s=90, what="its next process")
    wait_joined(own)
    prompt = "after its return: " + TEXT * 6
    assert ask(own, prompt, max_tokens=8, temperature=0) == ask(daemon, prompt, max_tokens=8, temperature=0)
    assert_handed_over(own, 1)


@pytest.mark.full
def test_requests_go_on_behind_their_tokens_when_the_decode_engine_is_killed(own: Daemon, daemon: Daemon) -> None:
    prompts = [f"{number}: " + TEXT * 6 for number in range(4)]
    fields = {"max_tokens": 600, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    asking = Asking(own, prompts, **fields).start()
    wait_for(lambda: own.metrics()["quire_generation_tokens_total"] > 100, timeout_s=60, what="tokens")
    os.kill(pid_of(own, "decode-0"), signal.SIGKILL)
    asking.assert_as_of(daemon)
    assert own.metrics()["quire_request_replays_total"] == len(prompts)


@pytest.mark.full
def test_several_engines_of_each_side_share_the_requests(start: Callable[..., Daemon], daemon: Daemon) -> None:
    flags = ("--disaggregate", "2p2d", *FLAGS[2:])
    served = start(*flags, "--http-workers", "1").wait_ready()
    prompts = [f"{number}: " + TEXT * 8 for number in range(8)]
    asking = Asking(served, prompts, max_tokens=16, temperature=0).start()
    asking.join()
    for prompt in prompts:
        assert asking.answers[prompt] == ask(daemon, prompt, max_tokens=16, temperature=0)
    os.kill(pid_of(served, "decode-0"), signal.SIGKILL)
    wait_for(lambda: served.get("/health").json()["engines"]["decode-0"] == "missing", timeout_s=30, what="its loss")
    assert served.get("/ready").status_code == 200
    assert ask(served, prompts[0], max_tokens=16, temperature=0) == asking.answers[prompts[0]]


@pytest.mark.full
@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "decode-1"])
def test_an_engine_that_is_told_to_end_under_load_loses_no_request(
    name: str, start: Callable[..., Daemon], daemon: Daemon
) -> None:
    flags = ("--disaggregate", "1p2d", *FLAGS[2:], "--http-workers", "1", "--drain-timeout", "120")
    served = start(*flags).wait_ready()
    prompts = [f"{number}: " + TEXT * 20 for number in range(6)]
    fields = {"max_tokens": 30, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    left = pid_of(served, name)
    asking = Asking(served, prompts[:4], **fields).start()
    wait_for(lambda: served.metrics()["quire_generation_tokens_total"] > 4, timeout_s=60, what="tokens")
    os.kill(left, signal.SIGTERM)
    late = Asking(served, prompts[4:], **fields).start()  # while it leaves
    late.join()
    asking.assert_as_of(daemon)
    late.assert_as_of(daemon)
    wait_for(lambda: pid_of(served, name) != left, timeout_s=120, what="its next process")
    wait_for(lambda: served.get("/health").json()["engines"][name] == "ready", timeout_s=180, what="its return")
    assert served.metrics()["quire_request_replays_total"] == 0, "requests ended where they were"
    assert served.metrics()["quire_engine_restarts_total"] == 1


@pytest.mark.full
def test_the_only_decode_engine_is_told_to_end_and_its_requests_go_on_with_the_next(
    own: Daemon, daemon: Daemon
) -> None:
    prompts = [f"{number}: " + TEXT * 6 for number in range(3)]
    fields = {"max_tokens": 100, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    asking = Asking(own, prompts, **fields).start()
    wait_for(lambda: own.metrics()["quire_generation_tokens_total"] > 20, timeout_s=60, what="tokens")
    os.kill(pid_of(own, "decode-0"), signal.SIGTERM)
    asking.assert_as_of(daemon)


@pytest.mark.full
def test_limits_of_a_key_hold_for_all_engines_together(start: Callable[..., Daemon], tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("sk-team inference name=team requests_per_minute=4\nsk-ops\n")
    served = start(*FLAGS, "--http-workers", "2", "--api-key-file", str(keys)).wait_ready()
    statuses = []
    for number in range(3):
        for prompt in ("Hello", f"{number}: " + TEXT * 6):  # one for each side
            body = {"model": "quire-demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            headers = {"authorization": "Bearer sk-team"}
            reply = httpx.post(f"{served.base_url}/v1/completions", json=body, headers=headers, timeout=60)
            statuses.append(reply.status_code)
    assert statuses == [200] * 4 + [429] * 2


@pytest.mark.full
def test_requests_go_on_when_all_decode_engines_are_killed(start: Callable[..., Daemon], daemon: Daemon) -> None:
    served = start("--disaggregate", "1p2d", *FLAGS[2:], "--http-workers", "1").wait_ready()
    prompts = [f"{number}: Hello" for number in range(3)] + [f"{number}: " + TEXT * 6 for number in range(3)]
    fields = {"max_tokens": 600, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    asking = Asking(served, prompts, **fields).start()
    wait_for(lambda: served.metrics()["quire_generation_tokens_total"] > 100, timeout_s=60, what="tokens")
    for pid in [pid_of(served, f"decode-{number}") for number in range(2)]:
        os.kill(pid, signal.SIGKILL)
    asking.assert_as_of(daemon)
