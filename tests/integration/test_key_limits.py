"""Names and limits of API keys on a real daemon with two HTTP workers: limits, headers, reload, ledger, fairness."""

import concurrent.futures
import csv
import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.daemon import ROOT, Daemon, wait_for

KEYS = """\
sk-team inference name=team requests_per_minute=5 tokens_per_minute=1000
sk-team-next inference name=team requests_per_minute=5 tokens_per_minute=1000
sk-grammar inference name=grammar grammar_seconds=0.001
sk-flood inference name=flood
sk-guest inference name=guest
sk-ops
"""


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="module")
def shared(key_file: Path, tmp_path_factory: pytest.TempPathFactory):
    flags = ["--device", "cpu", "--http-workers", "2", "--max-num-seqs", "16", "--max-model-len", "2048"]
    flags += ["--api-key-file", str(key_file), "--max-queue-wait", "0"]
    with Daemon(*flags, folder=tmp_path_factory.mktemp("shared")) as daemon:
        yield daemon.wait_ready()


def ask(daemon: Daemon, key: str, **fields: object) -> httpx.Response:
    """Ask over a connection of its own, so that any worker may answer."""
    body = {"prompt": [40] * 20, "max_tokens": 2, "ignore_eos": True, **fields}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{daemon.base_url}/v1/completions", json=body, headers=headers, timeout=120)


def usage(daemon: Daemon) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "server", "usage", "--url", daemon.base_url, "--api-key", "sk-ops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = csv.DictReader(io.StringIO(done.stdout))
    return {row.pop("key"): {name: float(value) for name, value in row.items()} for row in rows}


# rule: Limits: Limits of an API key hold over all HTTP workers
def test_limits_hold_over_all_workers_and_keys_of_a_name_and_change_by_sighup(shared: Daemon, key_file: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        keys = ["sk-team", "sk-team-next"] * 6
        replies = list(pool.map(lambda key: ask(shared, key), keys))
    assert Counter(reply.status_code for reply in replies) == {200: 5, 429: 7}
    taken = [reply for reply in replies if reply.status_code == 200]
    assert sorted(int(reply.headers["x-ratelimit-remaining-requests"]) for reply in taken) == [0, 1, 2, 3, 4]
    assert {reply.headers["x-ratelimit-limit-tokens"] for reply in replies} == {"1000"}
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "requests_per_minute, 5" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert ask(shared, "sk-guest").status_code == 200
    found = usage(shared)["team"]
    sent = [reply.json()["usage"] for reply in taken]
    assert (found["requests"], found["refused_requests"]) == (5, 7)
    assert found["generated_tokens"] == sum(one["completion_tokens"] for one in sent)
    assert found["cached_tokens"] == sum(one["prompt_tokens_details"]["cached_tokens"] for one in sent)
    assert found["computed_tokens"] + found["cached_tokens"] == sum(one["prompt_tokens"] for one in sent)
    assert found["device_seconds"] > 0

    key_file.write_text(KEYS.replace("requests_per_minute=5", "requests_per_minute=6"))
    os.kill(shared.process.pid, signal.SIGHUP)
    wait_for(lambda: "api keys reloaded" in shared.log, timeout_s=30, what="the reload")
    statuses: list[int] = []

    def is_seven() -> bool:  # a worker may not have heard of it yet
        statuses.append(ask(shared, "sk-team").status_code)
        return 200 in statuses

    wait_for(is_seven, timeout_s=30, what="the sixth request")
    assert ask(shared, "sk-team").status_code == 429


def test_grammar_seconds_are_spent_in_any_worker(shared: Daemon) -> None:
    replies = []

    def is_spent() -> bool:
        regex = f"[ab]{{{len(replies) + 1}}}"
        replies.append(ask(shared, "sk-grammar", structured_outputs={"regex": regex}))
        return replies[-1].status_code == 429

    wait_for(is_spent, timeout_s=60, what="a refusal")
    assert "grammar_seconds, 0.001 a minute" in replies[-1].json()["error"]["message"]
    assert replies[0].status_code == 200
    for _ in range(4):  # the other worker, too
        other = ask(shared, "sk-grammar", structured_outputs={"regex": f"[cd]{{{len(replies)}}}"})
        assert other.status_code == 429
    assert ask(shared, "sk-grammar").status_code == 200
    assert usage(shared)["grammar"]["grammar_seconds"] > 0


def test_usage_is_closed_to_keys_without_the_role(shared: Daemon) -> None:
    assert shared.get("/v1/usage", key="sk-guest").status_code == 403


def test_a_flood_of_one_key_does_not_keep_another_waiting(shared: Daemon) -> None:
    flood_ends: list[float] = []

    def flood(index: int) -> None:
        assert ask(shared, "sk-flood", prompt=[41 + index % 50] * 30, max_tokens=20).status_code == 200
        flood_ends.append(time.monotonic())

    ask(shared, "sk-guest")
    with concurrent.futures.ThreadPoolExecutor(120) as pool:
        futures = [pool.submit(flood, index) for index in range(120)]
        waiting = "quire_num_requests_waiting"
        wait_for(lambda: shared.metrics(key="sk-ops")[waiting] > 40, timeout_s=60, what="the flood")
        assert ask(shared, "sk-guest").status_code == 200
        guest_end = time.monotonic()
        for future in futures:
            future.result(120)
    assert sum(end > guest_end for end in flood_ends) > 40
