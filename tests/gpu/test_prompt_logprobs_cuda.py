"""Scores of prompts on CUDA: those of the CPU, with graphs and without, and beside requests that use graphs."""

from pathlib import Path

import pytest
import torch

from engine.core.local_client import generate
from engine.interface.protocol import SamplingParams
from tests.gpu.test_engine_cuda import checkpoint  # noqa: F401  (a fixture)
from tests.unit.engine.test_real_model import make_engine, prompts

pytestmark = pytest.mark.gpu

LENGTHS = (61, 17, 30, 40, 23)
PARAMS = [
    SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=3, logprobs=2),
    SamplingParams(max_tokens=20, temperature=0.0),
    SamplingParams(max_tokens=1, prompt_logprobs=0),
    SamplingParams(max_tokens=20, temperature=0.0, logprobs=1),
    SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=20),
]


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_cuda_gives_the_cpus_scores(checkpoint: Path, enforce_eager: bool, depth: int) -> None:  # noqa: F811
    torch.backends.cuda.matmul.allow_tf32 = False
    inputs = prompts(*LENGTHS)
    engine, transport = make_engine(checkpoint, block_size=16)
    expected = generate(engine, transport, inputs, PARAMS)
    engine, transport = make_engine(
        checkpoint,
        device="cuda",
        dtype="float32",
        block_size=16,
        overlap_depth=depth,
        enforce_eager=enforce_eager,
        kv_cache_memory_bytes=64 * 1024**2,
    )
    for _ in range(2):
        for one, other in zip(generate(engine, transport, inputs, PARAMS), expected, strict=True):
            assert one.token_ids == other.token_ids
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
            for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
                assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-3)
    assert engine.scheduler.kv.pool.num_used == 0
