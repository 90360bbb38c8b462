"""Blocks on disk of real daemons: the first turn after kill -9, of the engine and of the whole daemon, is found."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import needs_proc
from tests.support.daemon import Daemon, wait_for

Start = Callable[..., Daemon]
PROMPT = "The quire is a gathering of leaves, folded once and sewn through the fold. " * 8


def ask(daemon: Daemon) -> tuple[str, dict]:
    """Return the text of an answer, and what the cache had of its prompt."""
    body = {"model": "quire-demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    reply = httpx.post(f"{daemon.base_url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["text"], answer["cache"]


def num_on_disk(daemon: Daemon) -> float:
    return daemon.metrics().get("quire_kv_disk_blocks_total{event=written}", 0)


@needs_proc
@pytest.mark.full
def test_a_prompt_is_found_after_its_engine_and_its_daemon_were_killed(start: Start, tmp_path: Path) -> None:
    flags = ("--kv-host-memory", "32MiB", "--kv-disk", str(tmp_path / "blocks"))
    daemon = start(*flags).wait_ready()
    text, cache = ask(daemon)
    assert cache["cached_tokens"] == 0
    num_blocks = len(PROMPT) // 16 // 4  # at least, whatever the tokens are
    wait_for(lambda: num_on_disk(daemon) >= num_blocks, timeout_s=30, what="blocks on disk")
    engine = daemon.child("engine.process")
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: daemon.running("engine.process") not in ([], [engine]), timeout_s=60, what="another engine")
    wait_for(lambda: daemon.get("/ready").status_code == 200, timeout_s=60, what="ready")
    assert_found(daemon, text)
    daemon.process.kill()
    daemon.process.wait()
    assert_found(start(*flags).wait_ready(), text)


def assert_found(daemon: Daemon, text: str) -> None:
    again, cache = ask(daemon)
    assert again == text
    assert cache["disk_tokens"] == cache["host_tokens"] == cache["cached_tokens"] > 0


@needs_proc
@pytest.mark.full
def test_a_pinned_prompt_outlasts_others_on_disk_and_the_daemon(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    flags = ("--kv-host-memory", "16MiB", "--kv-disk", str(folder), "--kv-disk-size", "8MiB")
    daemon = start(*flags).wait_ready()
    asked(daemon, PROMPT, prompt_cache_retention="24h")
    other = f"Not kept. {PROMPT}"
    asked(daemon, other)
    wait_for(lambda: daemon.metrics().get("quire_kv_disk_pinned_bytes", 0) > 0, timeout_s=30, what="pins on disk")
    for number in range(100):
        asked(daemon, f"{number}: {PROMPT}")
    evicted = "quire_kv_disk_blocks_total{event=evicted}"
    wait_for(lambda: daemon.metrics()[evicted] > 500, timeout_s=30, what="blocks that leave the disk")
    daemon.process.kill()
    daemon.process.wait()
    daemon = start(*flags).wait_ready()
    wait_for(lambda: daemon.metrics().get("quire_kv_disk_pinned_bytes", 0) > 0, timeout_s=30, what="pins again")
    cache = asked(daemon, PROMPT)
    assert cache["disk_tokens"] == cache["cached_tokens"] > 100
    wait_for(lambda: daemon.metrics()["quire_kv_host_bytes{use=pinned}"] > 0, timeout_s=30, what="pins in host memory")
    assert asked(daemon, other)["cached_tokens"] < cache["cached_tokens"]


def asked(daemon: Daemon, prompt: str, **fields: object) -> dict:
    """Ask a chat; return what the cache had of its prompt."""
    body = {"model": "quire-demo", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1, **fields}
    reply = httpx.post(f"{daemon.base_url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["cache"]


@needs_proc
@pytest.mark.full
def test_a_prompt_of_a_split_model_is_found_after_its_daemon_was_killed(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    flags = ("--tensor-parallel-size", "2", "--kv-host-memory", "32MiB", "--kv-disk", str(folder))
    daemon = start(*flags).wait_ready()
    text, _ = ask(daemon)
    num_blocks = len(PROMPT) // 16 // 4
    wait_for(lambda: num_on_disk(daemon) >= num_blocks, timeout_s=30, what="blocks on disk")
    daemon.process.kill()
    daemon.process.wait()
    daemon = start(*flags).wait_ready()
    assert_found(daemon, text)
    assert daemon.metrics()["quire_kv_disk_copied_bytes_total{direction=read}"] > 0
