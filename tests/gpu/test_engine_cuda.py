"""The whole engine on CUDA: graphs on and off, depth 1 and 2, chunked or not, all give the CPU's float32 tokens."""

from pathlib import Path

import pytest
import torch

from engine.core.local_client import generate
from engine.interface.protocol import SamplingParams
from tests.support.tiny_llama import save_tiny_qwen3
from tests.unit.engine.test_real_model import make_engine, mixed_params, prompts, tokens

pytestmark = pytest.mark.gpu

LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What the torch path gives on the CPU."""
    engine, transport = make_engine(checkpoint, block_size=16)
    return tokens(generate(engine, transport, prompts(*LENGTHS), mixed_params(len(LENGTHS))))


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("attention_backend", ["triton", "torch"])
def test_cuda_gives_the_cpus_tokens(
    checkpoint: Path, expected: list[list[int]], enforce_eager: bool, depth: int, attention_backend: str
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine, transport = make_engine(
        checkpoint,
        device="cuda",
        dtype="float32",
        block_size=16,
        overlap_depth=depth,
        enforce_eager=enforce_eager,
        attention_backend=attention_backend,
        kv_cache_memory_bytes=64 * 1024**2,
    )
    for _ in range(2):  # the second time with prefix hits
        assert tokens(generate(engine, transport, prompts(*LENGTHS), mixed_params(len(LENGTHS)))) == expected
    assert engine.scheduler.kv.pool.num_used == 0


def test_many_requests_with_aborts_leave_every_block_free(checkpoint: Path) -> None:
    engine, transport = make_engine(
        checkpoint,
        device="cuda",
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=8 * 1024**2,
        max_model_len=256,
    )
    inputs = prompts(*(20 + i % 90 for i in range(512)))
    params = [SamplingParams(max_tokens=1 + i % 70, temperature=0.7, seed=i) for i in range(512)]
    original = engine.run_once

    def run_and_abort() -> None:
        original()
        running = engine.scheduler.running
        if engine.scheduler.committed_step_id % 7 == 3 and running:
            engine.scheduler.abort(running[len(running) // 2].request_id)

    engine.run_once = run_and_abort  # type: ignore[method-assign]
    generate(engine, transport, inputs, params)
    engine.scheduler.check()
    assert engine.scheduler.kv.pool.num_used == 0
