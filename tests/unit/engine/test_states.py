"""Models with recurrent layers through the whole engine: the same tokens in any schedule and memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.core.local_client import GenerationResult
from engine.interface.config import SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from tests.support.hybrid_model import LAYERS, VOCAB_SIZE, load_hybrid
from tests.unit.engine.test_real_model import tokens

NUM_TOKENS = 24
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=LAYERS)
def layers(request: pytest.FixtureRequest) -> Sequence[str]:
    return LAYERS[request.param]


def prompts() -> list[list[int]]:
    """Prompts of many lengths; half of them begin with the same 130 tokens, past two places where states are saved."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(0, VOCAB_SIZE, (130,), generator=generator).tolist()
    lengths = (1, 2, 3, 17, 63, 64, 65, 80, 129, 131, 135, 150, 192, 193, 200, 220)
    rest = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return [(shared + own)[:length] if length > 128 else own for own, length in zip(rest, lengths, strict=True)]


def params() -> list[SamplingParams]:
    kinds = (
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=5),
    )
    return [kinds[i % 2] for i in range(len(prompts()))]


def serve(offline: OfflineEngine) -> list[GenerationResult]:
    """Generate for all prompts at once, checking that nothing stays held."""
    results = offline.generate(prompts(), params())
    offline.engine.scheduler.check()
    assert offline.engine.scheduler.kv.pool.num_used == 0
    return results


@pytest.fixture(scope="module")
def alone(layers: Sequence[str]) -> list[list[int]]:
    """Each request served by itself without a prefix cache: what every other way must equal."""
    offline = load_hybrid(*layers, enable_prefix_caching=False, overlap_depth=1)
    pairs = zip(prompts(), params(), strict=True)
    return [tokens(offline.generate([prompt], [own]))[0] for prompt, own in pairs]


@pytest.mark.parametrize("depth", [1, 2])
def test_sixteen_at_once_and_hits(layers: Sequence[str], alone: list[list[int]], depth: int) -> None:
    offline = load_hybrid(*layers, overlap_depth=depth)
    assert tokens(serve(offline)) == alone
    again = serve(offline)
    assert tokens(again) == alone
    assert sum(result.num_cached_tokens for result in again) >= 5 * 128
    # a turn of a conversation begins where the one before it was saved
    longest = prompts()[-1] + alone[-1]
    (turn,) = offline.generate([[*longest, 5, 6, 7]], [SamplingParams(max_tokens=2, temperature=0.0)])
    assert turn.num_cached_tokens == 192
    assert offline.engine.scheduler.kv.state_events()["restored"] > 5


@pytest.mark.parametrize("num_tokens", [16, 24, 512])
def test_prompts_cut_anywhere(layers: Sequence[str], alone: list[list[int]], num_tokens: int) -> None:
    offline = load_hybrid(*layers, max_num_batched_tokens=num_tokens)
    for _ in range(2):
        assert tokens(serve(offline)) == alone
    assert offline.engine.scheduler.kv.state_events()["restored"] > 0


def small_pool(layers: Sequence[str], num_requests: int, **changes: object) -> OfflineEngine:
    """An engine whose pool holds so many requests of full length."""
    pages = load_hybrid(*layers).loaded.plan.pages
    num_bytes = (num_requests * pages.num_pages(250) + 1) * pages.page_bytes
    return load_hybrid(*layers, max_model_len=250, kv_cache_memory_bytes=num_bytes, **changes)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_cache", [False, True])
def test_preempted_requests_go_on_as_if_nothing_had_been(
    layers: Sequence[str], alone: list[list[int]], depth: int, has_cache: bool
) -> None:
    offline = small_pool(layers, 2, overlap_depth=depth, enable_prefix_caching=has_cache, max_num_seqs=None)
    assert tokens(serve(offline)) == alone
    assert offline.engine.scheduler.num_preemptions > 0
    assert tokens(serve(offline)) == alone


def repetitive() -> list[SamplingParams]:
    """Parameters with which few tokens are likely, so that some drafts are accepted and others are not."""
    bias = {5: 6.0, 7: 6.0, 11: 6.0}
    kinds = ({"temperature": 0.0}, {"temperature": 0.7, "seed": 3})
    return [SamplingParams(max_tokens=30, logit_bias=bias, **kinds[i % 2]) for i in range(len(prompts()))]


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_drafts_change_no_token(layers: Sequence[str], num_drafts: int) -> None:
    expected = tokens(load_hybrid(*layers, enable_prefix_caching=False).generate(prompts(), repetitive()))
    speculative = SpeculativeConfig(num_tokens=num_drafts, ngram_min=1, ngram_max=3)
    for depth in (1, 2):
        offline = small_pool(layers, 3, overlap_depth=depth, speculative=speculative, max_num_seqs=None)
        for _ in range(2):
            assert tokens(offline.generate(prompts(), repetitive())) == expected
        drafts = offline.engine.scheduler.drafts
        assert 20 < drafts.num_accepted < drafts.num_tokens
        assert offline.engine.scheduler.kv.pool.num_used == 0
