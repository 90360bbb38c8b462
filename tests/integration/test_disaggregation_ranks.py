"""Prefill and decode engines of two ranks each: answers as of one engine, also when one rank of either is killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import needs_proc
from tests.integration.test_disaggregation import BODIES, FLAGS, TEXT, Asking, ask, pid_of
from tests.support.daemon import Daemon, command_line, is_alive, wait_for
from tests.support.hand_overs import assert_handed_over, hand_overs, wait_joined

pytestmark = needs_proc
RANKS = ("--tensor-parallel-size", "2")


def rank_of(daemon: Daemon, name: str) -> int:
    """Return the process of an engine's second rank."""
    tasks = Path(f"/proc/{pid_of(daemon, name)}/task").glob("*/children")
    children = [int(pid) for children in tasks for pid in children.read_text().split()]
    (rank,) = [pid for pid in children if "engine.rank_process" in command_line(pid)]
    return rank


@pytest.fixture
def split(start: Callable[..., Daemon]) -> Daemon:
    return wait_joined(start(*FLAGS, *RANKS, "--http-workers", "1").wait_ready())


def test_answers_of_two_ranks_on_each_side_are_those_of_one_engine(split: Daemon, daemon: Daemon) -> None:
    names = ("greedy", "seeded", "penalties", "grammar", "two")
    for name in names:
        prompt = f"{name}: " + TEXT * 6
        assert ask(split, prompt, **BODIES[name]) == ask(daemon, prompt, **BODIES[name])
    assert_handed_over(split, len(names) + 1)
    metrics = split.metrics()
    assert metrics["quire_kv_handover_blocks_total{event=failed}"] == 0
    assert metrics["quire_kv_handover_bytes_total"] > 0
    assert metrics["quire_kv_handover_open_offers"] == 0
    assert split.get("/health").json() == {"status": "ok", "engines": {"prefill-0": "ready", "decode-0": "ready"}}
    assert "prefill-0 rank 1" in split.log
    assert "decode-0 rank 1" in split.log
    ranks = [rank_of(split, name) for name in ("prefill-0", "decode-0")]
    split.process.send_signal(signal.SIGTERM)
    assert split.process.wait(60) == 0
    for rank in ranks:
        wait_for(lambda rank=rank: not is_alive(rank), timeout_s=30, what="the rank ended")  # type: ignore[misc]


@pytest.mark.full
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_rank_that_is_killed_under_load_costs_no_request(name: str, split: Daemon, daemon: Daemon) -> None:
    prompts = [f"{number}: " + TEXT * 30 for number in range(6)]
    fields = {"max_tokens": 60, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    killed = rank_of(split, name)
    asking = Asking(split, prompts, **fields).start()
    wait_for(lambda: split.metrics()["quire_kv_handover_blocks_total{event=offered}"] > 20, timeout_s=60, what="offers")
    if name == "decode-0":
        wait_for(lambda: split.metrics()["quire_generation_tokens_total"] > 10, timeout_s=60, what="tokens")
    os.kill(killed, signal.SIGKILL)
    asking.assert_as_of(daemon)
    wait_for(lambda: "Rank 1 was killed by SIGKILL" in split.log, timeout_s=10, what="the reason")
    wait_for(lambda: split.get("/health").json()["engines"][name] == "ready", timeout_s=120, what="its next process")
    wait_joined(split)
    before = hand_overs(split)
    prompt = "after its return: " + TEXT * 6
    assert ask(split, prompt, max_tokens=8, temperature=0) == ask(daemon, prompt, max_tokens=8, temperature=0)
    assert_handed_over(split, 1, before=before)
    assert "Traceback" not in split.log
