"""A real checkpoint with NaN in one embedding row: only requests with that token fail."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.local_client import GenerationResult, generate
from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.nan_checkpoint import NAN_TOKEN, spoil_embedding
from tests.support.tiny_llama import VOCAB_SIZE, save_tiny_llama
from tests.unit.engine.test_real_model import make_engine, mixed_params, prompts, tokens

pytestmark = pytest.mark.slow

LENGTHS = (5, 17, 30, 61, 12, 40, 23, 35)
NEVER = {NAN_TOKEN: -100.0}  # so that no good request samples the token


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoil_embedding(save_tiny_llama(tmp_path_factory.mktemp("nan-llama")))


def good_params() -> list[SamplingParams]:
    params = mixed_params(len(LENGTHS))
    return [msgspec.structs.replace(each, logit_bias=each.logit_bias | NEVER) for each in params]


def good_prompts() -> list[list[int]]:
    return [[3 if token_id == NAN_TOKEN else token_id for token_id in prompt] for prompt in prompts(*LENGTHS)]


def spoiled(prompt: list[int], place: int) -> list[int]:
    return [*prompt[:place], NAN_TOKEN, *prompt[place + 1 :]]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    engine, transport = make_engine(checkpoint, overlap_depth=1, enable_prefix_caching=False)
    return tokens(generate(engine, transport, good_prompts(), good_params()))


BAD = {
    "greedy": SamplingParams(max_tokens=9, temperature=0.0),
    "drawn": SamplingParams(max_tokens=9, temperature=1.0, seed=1),
    "truncated": SamplingParams(max_tokens=9, temperature=1.0, seed=1, top_k=5, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=1.0, repetition_penalty=1.2),
    "bias": SamplingParams(max_tokens=9, temperature=0.0, logit_bias={3: 5.0}),
    "logprobs": SamplingParams(max_tokens=9, temperature=0.0, logprobs=3),
    "prompt_logprobs": SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=2),
    "mask": SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=[4, 5, 6]),
    "min_tokens": SamplingParams(max_tokens=9, temperature=0.0, min_tokens=4, stop_token_ids=[3, 4]),
}


@pytest.mark.parametrize("depth", [2, 1])
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.table
def test_one_spoiled_request_fails_and_the_others_have_their_tokens(
    checkpoint: Path, expected: list[list[int]], depth: int, kind: str
) -> None:
    engine, transport = make_engine(checkpoint, overlap_depth=depth)
    goods, bad = good_prompts(), spoiled(good_prompts()[3], 20)
    results = generate(
        engine, transport, [*goods[:4], bad, *goods[4:]], [*good_params()[:4], BAD[kind], *good_params()[4:]]
    )
    failed = results.pop(4)
    assert_invalid(failed)
    assert tokens(results) == expected
    # its blocks are reused, and a prefix that it shared is computed again
    again = generate(engine, transport, [*goods, bad], [*good_params(), BAD[kind]])
    assert_invalid(again.pop())
    assert tokens(again) == expected
    assert engine.scheduler.kv.pool.num_used == 0


def assert_invalid(result: GenerationResult) -> None:
    assert result.error is not None
    assert result.error.code == "model_output_invalid"
    assert not result.token_ids


def test_reused_blocks_hold_nothing_of_a_spoiled_request(checkpoint: Path) -> None:
    engine, transport = make_engine(checkpoint, enable_prefix_caching=False)
    params = [SamplingParams(max_tokens=3, temperature=0.0, logit_bias=NEVER)]
    assert_invalid(generate(engine, transport, [spoiled(good_prompts()[3], 5)], params)[0])
    caches = [engine._executor._kv_pool.rows]
    assert any(cache.isnan().any() for cache in caches)
    assert tokens(generate(engine, transport, good_prompts()[:1], params))
    assert all(cache.isfinite().all() for cache in caches)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_request_that_comes_to_the_token_fails_after_it(checkpoint: Path, depth: int, num_drafts: int) -> None:
    speculative = SpeculativeConfig(num_tokens=num_drafts, ngram_min=1, ngram_max=3) if num_drafts else None
    settings = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "device": "cpu"}
    config = EngineConfig(model=str(checkpoint), overlap_depth=depth, speculative=speculative, **settings)
    offline = OfflineEngine.load(config)
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, logit_bias={NAN_TOKEN: 100.0}),
        SamplingParams(max_tokens=20, temperature=0.0, logit_bias={5: 100.0}),
    ]
    bad, good = generate(offline.engine, offline.transport, good_prompts()[1:3], params)
    assert bad.error is not None
    assert bad.error.code == "model_output_invalid"
    assert bad.token_ids == [NAN_TOKEN]
    assert good.token_ids == [5] * 20


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_that_is_not_finite_fails(checkpoint: Path, pooling: str) -> None:
    engine, transport = make_engine(checkpoint)
    goods, params = good_prompts(), [SamplingParams(max_tokens=1)] * 4
    want = generate(engine, transport, goods[:3], params[:3], [pooling] * 3)
    inputs = [goods[0], spoiled(goods[3], 7), *goods[1:3]]
    first, bad, *rest = generate(engine, transport, inputs, params, [pooling] * 4)
    assert_invalid(bad)
    assert not bad.embedding
    for result, wanted in zip((first, *rest), want, strict=True):
        vectors = [np.frombuffer(each.embedding, dtype=np.float32) for each in (result, wanted)]
        np.testing.assert_allclose(*vectors, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_head_that_is_not_finite_fails_every_request_and_the_engine_goes_on(tmp_path: Path, value: float) -> None:
    folder = save_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][VOCAB_SIZE - 1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine, transport = make_engine(folder)
    for _ in range(2):
        for result in generate(engine, transport, good_prompts(), good_params()):
            assert result.error is not None
            assert result.error.code == "model_output_invalid"
    assert engine.is_idle
