"""`quire serve --tensor-parallel-size 2`: two processes share the demo model, answer as one, and end as one."""

import os
import re
import signal
from pathlib import Path

import openai
import pytest

from tests.integration.conftest import needs_proc
from tests.integration.test_bad_start import start_fails
from tests.support.daemon import Daemon, is_alive, wait_for
from tests.support.life_cycle import Start, Stream, ends_within, post, ready_status

pytestmark = needs_proc


def rank_of(daemon: Daemon) -> int:
    """The pid of the second rank, the engine's child."""
    engine = daemon.child("engine.process")
    (pid,) = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    assert b"engine.rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return int(pid)


def test_two_ranks_answer_and_end_as_one(start: Start) -> None:
    daemon = start("--tensor-parallel-size", "2").wait_ready()
    client = openai.OpenAI(base_url=daemon.base_url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=40,
    )
    assert "Paris" in answer.choices[0].message.content
    assert "2 × cpu" in daemon.log
    assert 'stage name=ranks detail="until each has its weights"' in daemon.log
    assert re.search(r"INFO +rank 1 +weights loaded after_s=", daemon.log)
    rank = rank_of(daemon)
    status = Path(f"/proc/{daemon.child('engine.process')}/status").read_text()
    (resident_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    metrics = daemon.metrics()
    assert metrics["quire_process_resident_memory_bytes{role=engine}"] > 1.5 * 1024 * resident_kib  # with its rank
    stream = Stream(daemon, max_tokens=60).wait_started()
    os.kill(rank, signal.SIGKILL)
    assert stream.wait_end()[-1]["choices"][0]["finish_reason"] == "length"  # it went on
    wait_for(lambda: ready_status(daemon) == 200, timeout_s=60, what="ready again")
    assert post(daemon).status_code == 200
    assert "Rank 1 was killed by SIGKILL (out of memory?)." in daemon.log
    assert "Traceback" not in daemon.log
    assert daemon.metrics()["quire_engine_restarts_total"] == 1
    second = rank_of(daemon)
    with ends_within(daemon, 30, 0):
        daemon.process.send_signal(signal.SIGTERM)
    wait_for(lambda: not is_alive(second), timeout_s=60, what="the rank ended")


@pytest.mark.full
def test_an_engine_that_is_killed_leaves_no_rank(start: Start) -> None:
    daemon = start("--tensor-parallel-size", "2").wait_ready()
    rank = rank_of(daemon)
    os.kill(daemon.process.pid, signal.SIGKILL)  # the front end first: then the engine goes, and with it the rank
    wait_for(lambda: not is_alive(rank), timeout_s=60, what="the rank ended")


@pytest.mark.full
def test_experts_that_a_model_has_not_are_refused() -> None:
    code, error = start_fails("--tensor-parallel-size", "2", "--expert-parallel", "--device", "cpu")
    assert code == 3
    assert "--expert-parallel: Qwen3ForCausalLM has no experts" in error


@pytest.mark.full
def test_heads_that_do_not_split_are_refused() -> None:
    code, error = start_fails("--tensor-parallel-size", "4", "--device", "cpu")
    assert code == 3
    assert "num_heads 6 does not split over 4 ranks" in error
