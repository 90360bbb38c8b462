"""A server's KV events as a router receives them: the tokens of what it served, again after a kill of its engine."""

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from engine.core.kv_events import Medium
from tests.support.daemon import Daemon, wait_for
from tests.support.kv_subscriber import HeldBlocks

zmq = pytest.importorskip("zmq")

PROMPT = "A quire is a set of sheets of paper, folded and sewn together. " * 8


@pytest.fixture
def subscriber():
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe("kv@")
    yield socket
    context.destroy(linger=0)


def take_in(socket, known):
    while socket.poll(100):
        _, _, payload = socket.recv_multipart()
        known.receive(payload)


def test_a_router_learns_what_was_served_and_that_a_new_engine_has_nothing(tmp_path: Path, subscriber) -> None:
    endpoint, known = f"ipc://{tmp_path}/events", HeldBlocks()
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv@127.0.0.1@demo"}
    arguments = ("--kv-host-memory", "64MiB", "--kv-disk", str(tmp_path / "disk"), "--kv-disk-size", "64MiB")
    subscriber.connect(endpoint)
    with Daemon(*arguments, "--kv-events-config", json.dumps(config), folder=tmp_path) as daemon:
        daemon.wait_ready()
        with httpx.Client(base_url=daemon.base_url, timeout=60) as client:
            tokens = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
            client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).raise_for_status()

            expected = [tokens[:end] for end in range(16, len(tokens) + 1, 16)]

            def is_told() -> bool:
                take_in(subscriber, known)
                held = [[known.tokens[hash_] for hash_ in known.held[medium]] for medium in Medium]
                return all(prefix in prefixes for prefixes in held for prefix in expected)

            wait_for(is_told, timeout_s=30, what="events of the prompt's blocks in all tiers")
            metrics = client.get("/metrics").text
            assert 'quire_kv_event_batches_total{model_name="' in metrics
            assert 'result="lost"} 0.0' in metrics

            num_cleared = known.num_cleared
            os.kill(daemon.child("engine.process"), signal.SIGKILL)

            def is_cleared() -> bool:
                take_in(subscriber, known)
                return known.num_cleared > num_cleared

            wait_for(is_cleared, timeout_s=60, what="the new engine's first event")
            assert not any(known.held.values())
            deadline_s = time.monotonic() + 60
            while client.get("/ready").status_code != 200:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).raise_for_status()
            wait_for(is_told, timeout_s=30, what="events of all tiers of the new engine")
            prefixes = [known.tokens[hash_] for hash_ in known.held[Medium.DISK]]
            assert expected[0] in prefixes, "blocks of the engine before are told of with their tokens"
