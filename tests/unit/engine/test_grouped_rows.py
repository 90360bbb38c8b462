"""Decode rows that are grouped by shared prefixes get the tokens that they get one by one, on a real tiny model."""

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest

from engine.core.local_client import generate
from engine.interface.config import EngineConfig, SharingRates
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.hybrid_model import pad_steps
from tests.support.tiny_llama import VOCAB_SIZE, save_tiny_llama

KV_BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 4  # k and v, layers, KV heads, head_dim, float32, tokens
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of which most begin with one of three documents, two of which begin alike; joins and leaves by chance."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCAB_SIZE) for _ in range(count)]

    system = tokens(12)
    documents = [system + tokens(20), system + tokens(28), tokens(24), []]
    prompts = [draw.choice(documents) + tokens(draw.randint(1, 14)) for _ in range(NUM_REQUESTS)]
    params = [
        SamplingParams(max_tokens=draw.randint(1, 20), temperature=draw.choice([0.0, 0.8]), seed=i)
        for i in range(NUM_REQUESTS)
    ]
    return prompts, params


def run(
    checkpoint: Path,
    seed: int,
    *,
    sharing: SharingRates | None,
    depth: int,
    blocks: int,
    is_padded: bool = False,
    **settings: object,
) -> tuple[list[list[int]], int, int]:
    """Tokens of all requests, the number of steps with groups, and the number of preemptions."""
    config = {
        "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 8, "device": "cpu", "max_model_len": 96,
        "kv_cache_memory_bytes": blocks * KV_BYTES_PER_BLOCK,
    } | settings  # fmt: skip
    loaded = OfflineEngine.load(EngineConfig(model=str(checkpoint), **config)).loaded
    limits = msgspec.structs.replace(loaded.scheduler_config, sharing=sharing)
    offline = OfflineEngine(dataclasses.replace(loaded, scheduler_config=limits), overlap_depth=depth)
    if is_padded:
        pad_steps(offline)
    num_grouped, forward = 0, loaded.runner.forward

    def watch(plan):
        nonlocal num_grouped
        num_grouped += plan.is_grouped
        return forward(plan)

    loaded.runner.forward = watch
    prompts, params = requests(seed)
    generations = generate(offline.engine, offline.transport, prompts, params)
    assert all(generation.error is None for generation in generations)
    offline.engine.scheduler.check()
    return [g.token_ids for g in generations], num_grouped, offline.engine.scheduler.num_preemptions


@pytest.mark.parametrize("is_padded", [False, True])  # as a graph is
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.table
def test_texts_with_groups_equal_those_without(checkpoint: Path, depth: int, seed: int, is_padded: bool) -> None:
    plain, num_grouped, _ = run(checkpoint, seed, sharing=None, depth=depth, blocks=400)
    assert num_grouped == 0
    rates = SharingRates(chunk_tokens=8)
    tokens, num_grouped, _ = run(checkpoint, seed, sharing=rates, depth=depth, blocks=400, is_padded=is_padded)
    assert num_grouped > 10
    assert tokens == plain


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("kv_cache_dtype", "blocks"), [("auto", 34), ("int8", 11)])  # int8 makes 3 of each
@pytest.mark.table
def test_preempted_requests_join_groups_again(checkpoint: Path, depth: int, kv_cache_dtype: str, blocks: int) -> None:
    settings = {"depth": depth, "blocks": blocks, "kv_cache_dtype": kv_cache_dtype}
    plain, _, _ = run(checkpoint, 3, sharing=None, **settings)
    tokens, num_grouped, num_preemptions = run(checkpoint, 3, sharing=SharingRates(chunk_tokens=4), **settings)
    assert num_preemptions > 0
    assert num_grouped > 10
    assert tokens == plain
