"""A model on two, four and eight GPUs gives the tokens of one, and ends as a whole. Needs two GPUs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from _pytest.mark.structures import ParameterSet
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.daemon import Daemon, is_alive, wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two GPUs"),
]

TIMEOUT_S = 200


def case(size: int, is_eager: bool, *values: int) -> ParameterSet:
    """Return a row of a table, whose name says the number of GPUs."""
    words = [f"{size}_gpus", "eager" if is_eager else "graphs", *(f"depth{value}" for value in values)]
    mark = pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"this machine has fewer than {size} GPUs")
    return pytest.param(size, is_eager, *values, id="-".join(words), marks=mark)


def tokens_of(checkpoint: Path, *, size: int, is_eager: bool, depth: int = 2) -> list[list[list[int]]]:
    return run_engine(checkpoint, size, is_eager, depth)[1]


def run_engine(checkpoint: Path, *arguments: object) -> tuple[str, list[list[list[int]]]]:
    """(Who makes the sums over GPUs, tokens); arguments: tensor_parallel_run's after the checkpoint."""
    command = [sys.executable, "-m", "tests.gpu.tensor_parallel_run", str(checkpoint), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stderr
    sums, found = run.stdout.splitlines()[-2:]
    return sums, json.loads(found)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with heads for eight GPUs, of which four share each key head."""
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.12,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Iterator[Future[list[list[list[int]]]]]:
    """The tokens of one GPU, computed beside the first test that compares with them: both mostly start a process."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(tokens_of, checkpoint, size=1, is_eager=False)


@pytest.mark.parametrize(
    ("size", "is_eager", "depth"),
    [
        case(2, False, 2),
        case(2, True, 2),
        case(2, False, 1),
        case(4, False, 2),
        case(4, True, 2),
        case(8, False, 2),
        case(8, True, 2),
    ],
)
def test_several_gpus_give_the_tokens_of_one(
    checkpoint: Path, expected: Future[list[list[list[int]]]], size: int, is_eager: bool, depth: int
) -> None:
    found = tokens_of(checkpoint, size=size, is_eager=is_eager, depth=depth)
    assert found == expected.result()


@pytest.mark.parametrize(("size", "is_eager"), [case(2, False), case(2, True), case(4, False), case(8, False)])
def test_sums_in_one_kernel_give_the_tokens_of_nccl(checkpoint: Path, size: int, is_eager: bool) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run_engine, checkpoint, size, is_eager, 2, "bfloat16", by_nccl) for by_nccl in (False, True)
        ]
        (ours, found), (theirs, expected) = (run.result() for run in runs)
    assert ours != theirs
    assert theirs == "by NCCL"
    rows = [(row, wanted) for round_ in zip(found, expected, strict=True) for row, wanted in zip(*round_, strict=True)]
    # The two round alike, but a norm adds its squares in another order
    # Ours rounds a sum once, NCCL at each of its steps, of which four ranks have more
    assert sum(row == wanted for row, wanted in rows) >= (0.75 if size == 2 else 0.5) * len(rows), rows


def test_the_end_of_a_killed_engine_is_its_ranks(checkpoint: Path) -> None:
    code = (
        "import sys, time; from engine.interface.config import EngineConfig; from engine.offline import OfflineEngine\n"
        "offline = OfflineEngine.load(EngineConfig(model=sys.argv[1], tensor_parallel_size=2, max_num_seqs=8,"
        " max_num_batched_tokens=48, kv_cache_memory_bytes=64 << 20))\n"
        "print(*offline.loaded.ranks.pids, flush=True); time.sleep(600)"
    )
    engine = subprocess.Popen([sys.executable, "-c", code, str(checkpoint)], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 1
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlives its engine"
        time.sleep(0.1)


def test_a_daemon_over_two_gpus_answers_and_comes_back(tmp_path: Path) -> None:
    memory = ("--kv-cache-memory", "1GiB")  # other tests may use the same GPUs
    with Daemon("--tensor-parallel-size", "2", *memory, folder=tmp_path) as daemon:
        daemon.wait_ready()
        assert "Paris" in capital_of_france(daemon)
        assert "2 × NVIDIA" in daemon.log
        os.kill(rank_of(daemon), signal.SIGKILL)
        wait_for(lambda: daemon.get("/ready").status_code == 503, timeout_s=10, what="the end of the engine")
        wait_for(lambda: "engine ready again" in daemon.log, timeout_s=60, what="ready again")
        wait_for(lambda: ask(daemon).status_code == 200, timeout_s=10, what="every worker knows the new engine")
        assert "Paris" in capital_of_france(daemon)
        assert "Rank 1 was killed by SIGKILL" in daemon.log
        assert "Traceback" not in daemon.log
        rank = rank_of(daemon)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
        wait_for(lambda: not is_alive(rank), timeout_s=10, what="the rank ended")


def capital_of_france(daemon: Daemon) -> str:
    reply = ask(daemon)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def ask(daemon: Daemon) -> httpx.Response:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "quire-demo", "messages": [question], "temperature": 0, "max_tokens": 40}
    return httpx.post(daemon.base_url + "/v1/chat/completions", json=body, timeout=60)


def rank_of(daemon: Daemon) -> int:
    engine = daemon.child("engine.process")
    pids = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    (rank,) = (pid for pid in pids if b"engine.rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(rank)
