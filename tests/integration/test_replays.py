"""Engines that are killed under streams of a real daemon: every answer is that of an undisturbed run."""

import json
import os
import signal
import threading
import time

import httpx

from tests.integration.conftest import needs_proc
from tests.support.daemon import Daemon, wait_for
from tests.support.life_cycle import MODEL, Start, Stream, ready_status

pytestmark = needs_proc
ENGINE = "engine.process"
CHAT = "/v1/chat/completions"


class Asked:
    """A request that is answered in a thread."""

    def __init__(self, daemon: Daemon, path: str, body: dict) -> None:
        self.body = {"model": MODEL, **body}
        self._url = daemon.base_url + path
        self.reply: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        self.reply = httpx.post(self._url, json=self.body, timeout=120)

    def answer(self) -> object:
        """Wait for the answer; return its text and usage, or its stream's text."""
        self._thread.join(120)
        assert self.reply is not None
        assert self.reply.status_code == 200, self.reply.text
        if not self.body.get("stream"):
            whole = self.reply.json()
            return whole.get("choices") or whole["content"], whole["usage"]
        lines = self.reply.text.splitlines()
        assert lines[-2] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        deltas = [choice for event in events for choice in event["choices"]]
        return [
            "".join(delta["delta"].get("content", "") for delta in deltas if delta["index"] == index)
            for index in range(self.body.get("n", 1))
        ]


def story(**fields: object) -> dict:
    return {"messages": [{"role": "user", "content": "Tell me a story"}], "ignore_eos": True, **fields}


REQUESTS = [
    (CHAT, story(stream=True, temperature=0, max_tokens=120)),
    (CHAT, story(stream=True, seed=7, n=3, max_tokens=60)),
    (CHAT, story(seed=8, max_tokens=120)),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Tell me a story"}], "temperature": 0, "max_tokens": 50},
    ),
]


def generated(daemon: Daemon) -> float:
    return daemon.metrics()["quire_generation_tokens_total"]


def kill_engine(daemon: Daemon) -> None:
    os.kill(daemon.child(ENGINE), signal.SIGKILL)
    wait_for(lambda: ready_status(daemon) == 503, timeout_s=60, what="not ready")


def wait_ready_again(daemon: Daemon) -> None:
    wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="ready again")


# rule: Streams: A stream outlives its engine: the next one goes on with it, and its text is that of an undisturbed run
def test_answers_outlive_engines_that_are_killed(start: Start) -> None:
    daemon = start("--http-workers", "2", "--no-prefix-caching").wait_ready()
    undisturbed = [asked.answer() for asked in [Asked(daemon, path, body) for path, body in REQUESTS]]
    tokens = daemon.metrics()["quire_prompt_tokens_total"]
    asked = [Asked(daemon, path, body) for path, body in REQUESTS]
    for _ in range(2):
        begun = generated(daemon)
        wait_for(lambda begun=begun: generated(daemon) >= begun + 60, timeout_s=60, what="each answer's begin")
        kill_engine(daemon)
        assert httpx.post(daemon.base_url + CHAT, json={"model": MODEL, **story()}).status_code == 503
        wait_ready_again(daemon)
    assert [each.answer() for each in asked] == undisturbed
    metrics = daemon.metrics()
    assert metrics["quire_engine_restarts_total"] == 2
    assert metrics["quire_request_replays_total"] >= 6
    assert metrics["quire_requests_failed_total{reason=engine_dead}"] == 0
    assert metrics["quire_prompt_tokens_total"] <= 2 * tokens
    assert "open requests go on requests=" in daemon.log
    assert "replays=" in daemon.log
    assert daemon.log.count("restarting delay_s=0.5") == 2  # a kill from outside is no failed restart


def test_a_drain_lets_those_finish_who_wait_for_an_engine(start: Start) -> None:
    daemon = start("--drain-timeout", "60").wait_ready()
    stream = Stream(daemon, max_tokens=60).wait_started()
    kill_engine(daemon)
    daemon.process.send_signal(signal.SIGTERM)
    assert stream.wait_end()[-1]["choices"][0]["finish_reason"] == "length"
    assert daemon.process.wait(60) == 0
    assert "engine ready again" in daemon.log


def test_a_drain_ends_at_once_when_nobody_waits(start: Start) -> None:
    daemon = start("--drain-timeout", "600").wait_ready()
    kill_engine(daemon)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0


def standby_waits(daemon: Daemon, number: int) -> None:
    wait_for(lambda: daemon.log.count("standby waits") >= number, timeout_s=90, what="a standby")


def test_a_standby_takes_over_and_the_next_one_waits(start: Start) -> None:
    daemon = start("--standby").wait_ready()
    standby_waits(daemon, 1)
    first, second = sorted(daemon.running(ENGINE))
    stream = Stream(daemon, max_tokens=150).wait_started()
    os.kill(second, signal.SIGKILL)  # it is replaced
    wait_for(lambda: "standby ended, restarting delay_s=0.5" in daemon.log, timeout_s=60, what="its end")
    standby_waits(daemon, 2)
    daemon.process.send_signal(signal.SIGSTOP)  # an HTTP worker hears of an end before the launcher does
    os.kill(first, signal.SIGKILL)
    lost = "engine restarting"
    wait_for(lambda: daemon.get("/health").json()["status"] == lost, timeout_s=60, what="a worker without engine")
    new = [Asked(daemon, CHAT, story(max_tokens=4, temperature=0)) for _ in range(3)]
    time.sleep(0.3)
    daemon.process.send_signal(signal.SIGCONT)
    assert len({str(asked.answer()) for asked in new}) == 1
    wait_for(lambda: daemon.log.count("engine ready again") == 1, timeout_s=60, what="the standby")
    assert "ended, restarting delay_s=0 " in daemon.log
    assert daemon.log.count("standby takes over") == 1
    engine = min(pid for pid in daemon.running(ENGINE) if pid not in (first, second))  # the other is the next standby
    os.kill(engine, signal.SIGKILL)  # before the next standby can take over
    wait_for(lambda: daemon.log.count("engine ready again") == 2, timeout_s=90, what="ready again")
    assert stream.wait_end()[-1]["choices"][0]["finish_reason"] == "length"
    assert daemon.metrics()["quire_engine_restarts_total"] == 2
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0
    assert "Traceback" not in daemon.log
    wait_for(lambda: not daemon.running(ENGINE), timeout_s=60, what="no engine")
