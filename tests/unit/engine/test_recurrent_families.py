"""Families with recurrent layers through the engine: the same tokens cold, cached, chunked, preempted and drafted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.checkpoints import make_config
from tests.support.reference import save_checkpoint
from tests.unit.engine.test_real_model import tokens

_OTHERS = ("falcon_h1", "qwen3_5_moe", "olmo_hybrid", "lfm2", "lfm2_moe", "granite_hybrid", "bamba_biases")
_OTHERS += ("nemotron_3", "kimi_linear", "kimi_linear_groups")
KINDS = ["qwen3_next", *(pytest.param(kind, marks=pytest.mark.full) for kind in _OTHERS)]
MAX_TOKENS = 230
NUM_TOKENS = 20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    config = make_config(request.param)
    config.max_position_embeddings = 256
    save_checkpoint(folder, config)
    return folder


def load(folder: Path, **changes: object) -> OfflineEngine:
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "max_model_len": MAX_TOKENS, "device": "cpu"}
    return OfflineEngine.load(EngineConfig(model=str(folder), **settings | changes))


def load_scarce(folder: Path, num_requests: int, **changes: object) -> OfflineEngine:
    """An engine whose pool holds so many requests of full length."""
    pages = load(folder).loaded.plan.pages
    num_bytes = (num_requests * pages.num_pages(MAX_TOKENS) + 1) * pages.page_bytes
    return load(folder, kv_cache_memory_bytes=num_bytes, max_num_seqs=None, **changes)


def prompts() -> list[list[int]]:
    """16 prompts; half of them begin with the same 130 tokens, past two places where states are saved."""
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(0, 97, (130,), generator=generator).tolist()
    lengths = (1, 2, 3, 17, 40, 63, 64, 65, 131, 133, 140, 150, 192, 193, 200, 205)
    own = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]
    return [(shared + rest)[:length] if length > 128 else rest for rest, length in zip(own, lengths, strict=True)]


def params() -> list[SamplingParams]:
    kinds = (
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=5),
    )
    return [kinds[index % 2] for index in range(16)]


def serve(offline: OfflineEngine) -> list[list[int]]:
    results = offline.generate(prompts(), params())
    offline.engine.scheduler.check()
    assert offline.engine.scheduler.kv.pool.num_used == 0
    return tokens(results)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """Each request served by itself without a prefix cache: the tokens of all other ways."""
    offline = load(folder, enable_prefix_caching=False, overlap_depth=1)
    return [tokens(offline.generate([prompt], [own]))[0] for prompt, own in zip(prompts(), params(), strict=True)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table(most=1)
def test_sixteen_at_once_then_again_from_the_cache(folder: Path, alone: list[list[int]], depth: int) -> None:
    offline = load(folder, overlap_depth=depth)
    assert serve(offline) == alone
    again = offline.generate(prompts(), params())
    assert tokens(again) == alone
    assert sum(result.num_cached_tokens for result in again) >= 8 * 128
    assert offline.engine.scheduler.kv.state_events()["restored"] > 5


@pytest.mark.parametrize("num_tokens", [16, 50])
@pytest.mark.table
def test_prompts_cut_by_a_small_budget(folder: Path, alone: list[list[int]], num_tokens: int) -> None:
    offline = load(folder, max_num_batched_tokens=num_tokens)
    assert [serve(offline), serve(offline)] == [alone, alone]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table(most=1)
def test_preempted_requests(folder: Path, depth: int) -> None:
    """Few requests run at once, as states take pages; their answers are long, so that these pages are not enough."""
    inputs, greedy = prompts()[4:10], [SamplingParams(max_tokens=120, temperature=0.0)] * 6
    expected = tokens(load(folder, enable_prefix_caching=False).generate(inputs, greedy))
    offline = load_scarce(folder, 2, overlap_depth=depth)
    for _ in range(2):
        assert tokens(offline.generate(inputs, greedy)) == expected
    assert offline.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table(most=1)
def test_drafts(folder: Path, depth: int) -> None:
    """Few tokens are likely, so that some drafts are accepted and others are not."""
    bias = {5: 6.0, 7: 6.0, 11: 6.0}
    likely = [SamplingParams(max_tokens=40, temperature=0.0, logit_bias=bias)] * 16
    expected = tokens(load(folder, enable_prefix_caching=False).generate(prompts(), likely))
    speculative = SpeculativeConfig(num_tokens=3, ngram_min=1, ngram_max=3)
    offline = load_scarce(folder, 4, overlap_depth=depth, speculative=speculative)
    for _ in range(2):
        assert tokens(offline.generate(prompts(), likely)) == expected
    drafts = offline.engine.scheduler.drafts
    assert 0 < drafts.num_accepted < drafts.num_tokens
