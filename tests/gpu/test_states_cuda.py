"""Hybrids on CUDA, in graphs: cold, cached, cut, preempted and drafted, all give the CPU's float32 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from engine.interface.config import SpeculativeConfig
from engine.offline import OfflineEngine
from tests.support.hybrid_model import LAYERS, Untouched, load_hybrid
from tests.unit.engine.test_real_model import tokens
from tests.unit.engine.test_states import params, prompts, repetitive

pytestmark = pytest.mark.gpu
SPECULATIVE = SpeculativeConfig(num_tokens=4, ngram_min=1, ngram_max=3)


@pytest.fixture(scope="module", params=LAYERS)
def layers(request: pytest.FixtureRequest) -> Sequence[str]:
    return LAYERS[request.param]


@pytest.fixture(scope="module")
def expected(layers: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens on the CPU, without a prefix cache: of params(), and of repetitive()."""
    offline = load_hybrid(*layers, block_size=16, enable_prefix_caching=False)
    return tokens(offline.generate(prompts(), params())), tokens(offline.generate(prompts(), repetitive()))


def load(layers: Sequence[str], **changes: object) -> OfflineEngine:
    """Load on CUDA, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = {"device": "cuda", "dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 64 << 20}
    return load_hybrid(*layers, **settings | changes)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_cold_and_cached(layers: Sequence[str], expected: tuple, depth: int, enforce_eager: bool) -> None:
    offline = load(layers, overlap_depth=depth, enforce_eager=enforce_eager)
    for _ in range(2):
        results = offline.generate(prompts(), params())
        assert tokens(results) == expected[0]
    assert sum(result.num_cached_tokens for result in results) >= 5 * 128
    assert offline.engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("num_tokens", [16, 512])
def test_prompts_cut_anywhere(layers: Sequence[str], expected: tuple, num_tokens: int) -> None:
    offline = load(layers, max_num_batched_tokens=num_tokens)
    for _ in range(2):
        assert tokens(offline.generate(prompts(), params())) == expected[0]


@pytest.mark.parametrize("speculative", [None, SPECULATIVE])
def test_preempted(layers: Sequence[str], speculative: SpeculativeConfig | None) -> None:
    """Answers so long that the pool runs out of pages."""
    inputs = [prompt[:100] for prompt in prompts()]
    long = [msgspec.structs.replace(params, max_tokens=140) for params in repetitive()]
    expected = tokens(load_hybrid(*layers, block_size=16, enable_prefix_caching=False).generate(inputs, long))
    pages = load(layers).loaded.plan.pages
    num_bytes = (2 * pages.num_pages(250) + 1) * pages.page_bytes
    offline = load(
        layers, kv_cache_memory_bytes=num_bytes, max_model_len=250, max_num_seqs=None, speculative=speculative
    )
    for _ in range(2):
        assert tokens(offline.generate(inputs, long)) == expected
    assert offline.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_drafted(layers: Sequence[str], expected: tuple, depth: int, enforce_eager: bool) -> None:
    offline = load(layers, overlap_depth=depth, enforce_eager=enforce_eager, speculative=SPECULATIVE)
    for _ in range(2):
        assert tokens(offline.generate(prompts(), repetitive())) == expected[1]
    drafts = offline.engine.scheduler.drafts
    assert 20 < drafts.num_accepted < drafts.num_tokens


@pytest.mark.parametrize("speculative", [None, SPECULATIVE])
@pytest.mark.parametrize("num_requests", [1, 3, 13])
def test_padding_rows_write_no_state(
    layers: Sequence[str], expected: tuple, num_requests: int, speculative: SpeculativeConfig | None
) -> None:
    offline = load(layers, speculative=speculative)
    untouched = Untouched(offline)
    assert tokens(offline.generate(prompts()[:num_requests], repetitive()[:num_requests])) == expected[1][:num_requests]
    torch.cuda.synchronize()
    untouched.check()


def test_pages_are_copied_while_steps_run(layers: Sequence[str]) -> None:
    """A copy is queued behind the steps before it: the same prefix many times, each restored from one saved state."""
    offline = load(layers, overlap_depth=2)
    inputs, greedy = [prompts()[-1]] * 16, [repetitive()[0]] * 16
    first = tokens(offline.generate(inputs[:1], greedy[:1]))
    assert tokens(offline.generate(inputs, greedy)) == first * 16
    assert offline.engine.scheduler.kv.state_events()["restored"] >= 16
