"""Embeddings on CUDA: those of the CPU, with graphs and without, and beside requests that use graphs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.local_client import generate
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.unit.engine.test_embeddings import load, prompts, save, vectors

pytestmark = pytest.mark.gpu

LENGTHS = (61, 17, 1, 30, 40, 23)
KINDS = ["last", None, "mean", None, "mean", "last"]
PARAMS = [SamplingParams(max_tokens=20, temperature=0.0)] * len(LENGTHS)


def on_cuda(folder: Path, **changes: object) -> OfflineEngine:
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 64 * 1024**2} | changes
    return OfflineEngine.load(EngineConfig(model=str(folder), device="cuda", **settings))


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [16, 2048])
def test_cuda_gives_the_cpus_embeddings_and_tokens(
    tmp_path: Path, enforce_eager: bool, depth: int, budget: int
) -> None:
    folder, inputs = save(tmp_path, "llama"), prompts(*LENGTHS)
    cpu = load(folder, block_size=16)
    expected = generate(cpu.engine, cpu.transport, inputs, PARAMS, KINDS)
    cuda = on_cuda(
        folder, overlap_depth=depth, enforce_eager=enforce_eager, max_num_batched_tokens=budget, max_num_seqs=8
    )
    for _ in range(2):
        found = generate(cuda.engine, cuda.transport, inputs, PARAMS, KINDS)
        for one, other, kind in zip(found, expected, KINDS, strict=True):
            assert one.token_ids == other.token_ids
            if kind is not None:
                np.testing.assert_allclose(*(vectors([generation])[0] for generation in (one, other)), atol=1e-3)
    assert cuda.engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_model_without_a_head_starts_and_embeds(tmp_path: Path, kind: str) -> None:
    folder, inputs = save(tmp_path, "qwen3-headless"), prompts(*LENGTHS)
    cuda = on_cuda(folder)
    cuda.self_test()
    for one, other in zip(vectors(cuda.embed(inputs, kind)), vectors(load(folder).embed(inputs, kind)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
