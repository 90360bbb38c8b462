"""Models with recurrent layers through the whole engine: the same tokens in any schedule and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.core.local_client import GenerationResult
from engine.interface.config import EngineConfig, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.load import _decide
from engine.startup.loaded_engine import LoadedEngine
from engine.startup.rehearsal import serve_small
from tests.support.checkpoints import make_config
from tests.support.hybrid_model import LAYERS, VOCAB_SIZE, Untouched, hybrid_config, load_hybrid, pad_steps, served
from tests.support.reference import save_checkpoint
from tests.unit.engine.test_real_model import tokens

NUM_TOKENS = 24
pytestmark = pytest.mark.slow


# the other models have a part of the layers of this one each
EVERY_KIND = pytest.mark.parametrize(
    "layers",
    [name if name == "every kind" else pytest.param(name, marks=pytest.mark.full) for name in LAYERS],
    indirect=True,
)


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


@EVERY_KIND
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table(most=1)
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


@EVERY_KIND
@pytest.mark.parametrize("num_tokens", [16, 24, 512])
@pytest.mark.table
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


@EVERY_KIND
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.table(most=1)
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


@pytest.fixture(scope="module")
def repeated(layers: Sequence[str]) -> list[list[int]]:
    """The tokens of all requests with such parameters."""
    return tokens(load_hybrid(*layers, enable_prefix_caching=False).generate(prompts(), repetitive()))


@EVERY_KIND
@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table(most=1)
def test_drafts_change_no_token(layers: Sequence[str], repeated: list[list[int]], depth: int, num_drafts: int) -> None:
    speculative = SpeculativeConfig(num_tokens=num_drafts, ngram_min=1, ngram_max=3)
    offline = small_pool(layers, 3, overlap_depth=depth, speculative=speculative, max_num_seqs=None)
    for _ in range(2):
        assert tokens(offline.generate(prompts(), repetitive())) == repeated
    drafts = offline.engine.scheduler.drafts
    assert 20 < drafts.num_accepted < drafts.num_tokens
    assert offline.engine.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table(most=1)
def test_a_turn_goes_on_from_a_state_saved_in_the_answer_before_it(depth: int, num_drafts: int) -> None:
    params = SamplingParams(max_tokens=120, temperature=0.7, seed=3, logit_bias={5: 6.0, 7: 6.0, 11: 6.0})
    cold = load_hybrid(*LAYERS["every kind"], enable_prefix_caching=False, overlap_depth=1)
    firsts = [prompt[:40] for prompt in prompts()[4:8]]
    answers = tokens(cold.generate(firsts, [params] * 4))
    turns = [[*first, *answer][:129] for first, answer in zip(firsts, answers, strict=True)]
    any_token = SamplingParams(max_tokens=20, temperature=1.0, seed=4)  # shows a small error of the state
    expected = tokens(cold.generate(turns, [any_token] * 4))
    speculative = SpeculativeConfig(num_tokens=num_drafts, ngram_min=1, ngram_max=3) if num_drafts else None
    offline = load_hybrid(*LAYERS["every kind"], overlap_depth=depth, speculative=speculative)
    checkpoints = offline.engine.scheduler.kv.checkpoints
    checkpoints.answer_step = 64
    assert tokens(offline.generate(firsts, [params] * 4)) == answers
    assert checkpoints.num_saved_in_answers == 4 * 2
    results = offline.generate(turns, [any_token] * 4)
    assert [result.num_cached_tokens for result in results] == [128] * 4
    assert tokens(results) == expected
    assert bool(offline.engine.scheduler.drafts.num_accepted) == bool(num_drafts)


@EVERY_KIND
@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.table
def test_padding_writes_no_state(layers: Sequence[str], repeated: list[list[int]], num_drafts: int) -> None:
    """Steps padded as CUDA graphs are; tests/gpu/test_states_cuda.py has the graphs."""
    speculative = SpeculativeConfig(num_tokens=num_drafts, ngram_min=1, ngram_max=3) if num_drafts else None
    offline = pad_steps(load_hybrid(*layers, speculative=speculative, overlap_depth=2))
    untouched = Untouched(offline)
    for _ in range(2):
        assert tokens(offline.generate(prompts(), repetitive())) == repeated
    untouched.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"block_size": 3},
        {"block_size": 48},
        {"block_size": 100},
    ],
    ids=str,
)
def test_pools_of_other_dtypes_and_blocks(changes: dict[str, object]) -> None:
    layers = LAYERS["every kind"]
    inputs, greedy = prompts()[8:], [SamplingParams(max_tokens=12, temperature=0.0)] * 8
    offline = load_hybrid(*layers, **changes)
    cold = tokens(offline.generate(inputs, greedy))
    again = offline.generate(inputs, greedy)
    assert tokens(again) == cold
    step = offline.engine.scheduler.kv.layout.step
    assert step % 64 == 0
    cached = [result.num_cached_tokens for result in again]
    assert all(count % step == 0 for count in cached)
    assert (sum(cached) > 0) == (step <= 192)
    for view in (view for views in offline.loaded.runner._kv_pool.states for view in views):
        assert view.pool.dtype == torch.float32
    if "dtype" not in changes and "kv_cache_dtype" not in changes:
        assert cold == tokens(load_hybrid(*layers).generate(inputs, greedy))


def test_the_small_model_of_precompilation_runs() -> None:
    """It has one layer of each kind, the first layer's twice, in the pages of the whole model."""
    layers = LAYERS["every kind"] * 3
    with served(hybrid_config(*layers)):
        setup = _decide(EngineConfig(model="", device="cpu", block_size=4, load_format="dummy"), rank=0)
        plan = setup.plan_pool(has_weights=False)
        loaded: list[LoadedEngine] = []
        serve_small(setup, plan, loaded.append)
    offline = OfflineEngine(loaded[0])
    num_kinds = len(set(LAYERS["every kind"]))
    assert len(offline.loaded.runner._kv_pool.layers) == num_kinds + 1
    for _ in range(2):
        (result,) = offline.generate([prompts()[-1]], [SamplingParams(max_tokens=8, temperature=0.0)])
    assert result.error is None
    assert result.num_cached_tokens == 192


@EVERY_KIND
def test_prompt_logprobs_and_embeddings_of_long_prompts(layers: Sequence[str]) -> None:
    """Steps that return hidden states of whole prompts advance states too."""
    asked = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=1)
    plain = SamplingParams(max_tokens=6, temperature=0.0)
    offline = load_hybrid(*layers)
    inputs = prompts()[8:]
    expected = tokens(offline.generate(inputs, [plain] * len(inputs)))
    assert tokens(offline.generate(inputs, [asked] * len(inputs))) == expected
    results = [load_hybrid(*layers, max_num_batched_tokens=size).generate(inputs, [asked] * 8) for size in (24, 512)]
    for one, other in zip(*results, strict=True):
        assert [entry.logprob for entry in one.prompt_logprobs] == pytest.approx(
            [entry.logprob for entry in other.prompt_logprobs], abs=1e-4
        )
    vectors = [
        np.frombuffer(load_hybrid(*layers, max_num_batched_tokens=size).embed(inputs, "mean")[-1].embedding, np.float32)
        for size in (24, 512)
    ]
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-3)


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1"])
@pytest.mark.full
def test_two_ranks_give_the_same(kind: str, tmp_path: Path) -> None:
    """Each with its share of the states, drafts included, in a pool that is too small for all requests at once."""
    config = make_config(kind)
    config.max_position_embeddings = 320
    save_checkpoint(tmp_path, config)
    shared = EngineConfig(model=str(tmp_path), device="cpu", block_size=4, max_num_batched_tokens=80, max_model_len=260)
    expected = tokens(OfflineEngine.load(shared).generate(prompts(), repetitive()))
    speculative = SpeculativeConfig(num_tokens=3, ngram_min=1, ngram_max=3)
    changes = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 400_000, "speculative": speculative}
    offline = OfflineEngine.load(msgspec.structs.replace(shared, **changes))
    try:
        for _ in range(2):
            results = offline.generate(prompts(), repetitive())
            assert tokens(results) == expected
        assert sum(result.num_cached_tokens for result in results) > 0
        assert offline.engine.scheduler.drafts.num_accepted > 0
    finally:
        offline.loaded.close()


FIRST, SECOND = (
    [SamplingParams(max_tokens=size, logit_bias={5: 5.0, 7: 5.0}, temperature=0.0)] * 3 for size in (120, 12)
)


@pytest.fixture(scope="module")
def conversations(layers: Sequence[str]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The first answers of three conversations, their second prompts, and the second answers."""
    cold = load_hybrid(*layers, enable_prefix_caching=False)
    inputs = [prompts()[index] for index in (3, 7, 11)]
    answers = tokens(cold.generate(inputs, FIRST))
    turns = [[*prompt, *answer, 1, 2] for prompt, answer in zip(inputs, answers, strict=True)]
    return answers, turns, tokens(cold.generate(turns, SECOND))


@EVERY_KIND
@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table
def test_a_state_saved_in_an_answer_is_that_of_its_tokens(
    layers: Sequence[str],
    conversations: tuple[list[list[int]], list[list[int]], list[list[int]]],
    depth: int,
    num_drafts: int,
) -> None:
    """The next turn of a conversation begins there, after rows with and without drafts."""
    answers, turns, expected = conversations
    speculative = SpeculativeConfig(num_tokens=num_drafts, ngram_min=1, ngram_max=3) if num_drafts else None
    offline = load_hybrid(*layers, speculative=speculative, overlap_depth=depth)
    assert tokens(offline.generate([prompts()[index] for index in (3, 7, 11)], FIRST)) == answers
    results = offline.generate(turns, SECOND)
    assert tokens(results) == expected
    assert [result.num_cached_tokens for result in results] == [128, 192, 256]


@pytest.mark.parametrize(("block_size", "hit_tokens"), [(16, None), (48, 192)])
def test_a_block_size_that_costs_hits_is_told(
    block_size: int, hit_tokens: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    offline = load_hybrid(*LAYERS["delta rule"], block_size=block_size)
    told = [record.getMessage() for record in caplog.records if "prefix hits end" in record.getMessage()]
    offline.loaded.close()
    assert len(told) == (hit_tokens is not None)
    assert all(f"hit_tokens={hit_tokens} " in text for text in told)
