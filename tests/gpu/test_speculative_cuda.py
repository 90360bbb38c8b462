"""Speculation on CUDA: the CPU's tokens, with graphs and without, whatever runs beside."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.core.local_client import generate
from engine.device.cuda_graph import MANY_DRAFTED_MAX_TOKENS, mixed_shapes
from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.gpu.test_engine_cuda import checkpoint  # noqa: F401  (a fixture)
from tests.unit.engine.test_real_model import mixed_params, tokens
from tests.unit.engine.test_speculative_model import repeating_prompts

pytestmark = pytest.mark.gpu

SPECULATIVE = SpeculativeConfig(num_tokens=5, ngram_min=1, ngram_max=3)
# forced to repeat itself, so that drafts are accepted whatever the weights are
FORCED = [SamplingParams(max_tokens=60, temperature=0.0, logit_bias={5 + i: 100.0}) for i in range(4)]


def params_of(count: int) -> list[SamplingParams]:
    """Every kind of request, and every fourth one forced."""
    kinds = mixed_params(count)
    return [FORCED[i // 4 % 4] if i % 4 == 0 else kinds[i] for i in range(count)]


def load(checkpoint: Path, *, speculative: SpeculativeConfig | None = SPECULATIVE, **changes: object) -> OfflineEngine:  # noqa: F811
    settings = {"block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 8} | changes
    return OfflineEngine.load(EngineConfig(model=str(checkpoint), speculative=speculative, **settings))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:  # noqa: F811
    """What the CPU gives without speculation."""
    offline = load(checkpoint, speculative=None, device="cpu")
    return tokens(generate(offline.engine, offline.transport, repeating_prompts(12), params_of(12)))


@pytest.mark.parametrize("attention_backend", ["triton", "torch"])
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_cuda_gives_the_cpus_tokens(
    checkpoint: Path,  # noqa: F811
    expected: list[list[int]],
    depth: int,
    enforce_eager: bool,
    attention_backend: str,
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    offline = load(
        checkpoint,
        device="cuda",
        dtype="float32",
        overlap_depth=depth,
        enforce_eager=enforce_eager,
        attention_backend=attention_backend,
        kv_cache_memory_bytes=64 * 1024**2,
    )
    for _ in range(2):  # the second time over the prefix cache
        assert tokens(offline.generate(repeating_prompts(12), params_of(12))) == expected
    scheduler = offline.engine.scheduler
    assert scheduler.drafts.num_accepted > 100
    assert scheduler.kv.pool.num_used == 0


def test_many_drafted_rows_give_what_they_give_without(checkpoint: Path) -> None:  # noqa: F811
    """More than FEW_ROWS rows of several tokens each; the same loaded engine with drafts and without."""
    torch.backends.cuda.matmul.allow_tf32 = False
    offline = load(
        checkpoint,
        device="cuda",
        dtype="float32",
        max_num_seqs=64,
        kv_cache_memory_bytes=256 * 1024**2,
        overlap_depth=2,
    )
    inputs = [[7, 5, 5, 5 + i % 9] * 5 for i in range(64)]
    params = [SamplingParams(max_tokens=40, temperature=0.0, logit_bias={5 + i % 9: 100.0}) for i in range(64)]
    drafted = offline.generate(inputs, params)
    plain = OfflineEngine(dataclasses.replace(offline.loaded, speculative=None))
    assert tokens(drafted) == tokens(plain.generate(inputs, params))
    with_drafts, without = offline.engine.scheduler, plain.engine.scheduler
    assert with_drafts.drafts.num_accepted > 500
    assert with_drafts.committed_step_id < without.committed_step_id * 0.6
    shapes = mixed_shapes(64, 512, max_num_samples=256)
    assert any(shape.num_prefills == shape.num_rows == 257 for shape in shapes)
    assert all(s.num_tokens <= MANY_DRAFTED_MAX_TOKENS for s in shapes if s.num_prefills == 257)


def test_bfloat16_answers_are_valid_and_drafts_are_accepted(checkpoint: Path) -> None:  # noqa: F811
    """Where rounding depends on the shape of a batch tokens may differ; lengths and forced answers may not."""
    offline = load(checkpoint, device="cuda", dtype="bfloat16", kv_cache_memory_bytes=64 * 1024**2)
    offline.self_test()
    answers = offline.generate(repeating_prompts(12), params_of(12))
    for params, answer in zip(params_of(12), answers, strict=True):
        if params in FORCED:
            (forced,) = params.logit_bias
            assert answer.token_ids == [forced] * params.max_tokens
    assert offline.engine.scheduler.drafts.num_accepted > 100
