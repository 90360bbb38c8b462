"""Models whose layers keep unlike caches, through the whole engine: the same tokens in any schedule and memory."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from engine.core.local_client import GenerationResult
from engine.core.step import StepHandle, StepPlan
from engine.interface.config import EngineConfig, LoraSource, SharingRates, SpeculativeConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup.load import _decide
from engine.startup.loaded_engine import LoadedEngine
from engine.startup.rehearsal import serve_small
from tests.support.checkpoints import make_config
from tests.support.lora_adapters import ATTENTION, adapter_config, make_tensors, modules, save_adapter, save_merged
from tests.support.reference import save_checkpoint
from tests.unit.engine.test_real_model import tokens

BLOCK = 4
# windows alone, unequal heads with shared layers, sinks; the last two beside full layers
KINDS = ("mistral", "gemma4_shared", "gpt_oss")
OTHERS = ("gemma2", "gemma3", "qwen2_windows", "llama4_no_norm")  # beside full layers as well, and chunks
NUM_TOKENS = 24
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.full) for kind in OTHERS)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    config = make_config(request.param)
    config.max_position_embeddings = 160
    save_checkpoint(folder, config)
    return folder


def load(folder: Path, **changes: object) -> OfflineEngine:
    settings = {"block_size": BLOCK, "max_num_batched_tokens": 24, "max_num_seqs": 16, "device": "cpu"} | changes
    return OfflineEngine.load(EngineConfig(model=str(folder), **settings))


def prompts() -> list[list[int]]:
    """Prompts of many lengths; half of them begin with the same 40 tokens."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(0, 97, (40,), generator=generator).tolist()
    lengths = (1, 3, 9, 16, 17, 23, 32, 40, 41, 44, 52, 60, 63, 70, 80, 95)
    rest = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]
    return [(shared + own)[:length] if length > 40 else own for own, length in zip(rest, lengths, strict=True)]


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
def alone(checkpoint: Path) -> list[list[int]]:
    """Each request served by itself without a prefix cache: what every other way must equal."""
    offline = load(checkpoint, enable_prefix_caching=False, overlap_depth=1)
    pairs = zip(prompts(), params(), strict=True)
    return [tokens(offline.generate([prompt], [own]))[0] for prompt, own in pairs]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table(most=2)
def test_rows_grouped_by_shared_prefixes_get_the_same_tokens(
    checkpoint: Path, alone: list[list[int]], depth: int
) -> None:
    loaded = load(checkpoint).loaded
    forward, num_grouped = loaded.runner.forward, 0

    def watch(plan: StepPlan) -> StepHandle:
        nonlocal num_grouped
        num_grouped += plan.is_grouped
        return forward(plan)

    loaded.runner.forward = watch
    limits = msgspec.structs.replace(loaded.scheduler_config, sharing=SharingRates(chunk_tokens=8))
    offline = OfflineEngine(dataclasses.replace(loaded, scheduler_config=limits), overlap_depth=depth)
    assert tokens(serve(offline)) == alone
    assert tokens(serve(offline)) == alone
    has_group = sum(group.kind == "full" for group in limits.cache_groups) == 1
    assert bool(num_grouped) == has_group


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table
def test_sixteen_at_once_and_hits_of_each_kind(checkpoint: Path, alone: list[list[int]], depth: int) -> None:
    offline = load(checkpoint, overlap_depth=depth)
    assert tokens(serve(offline)) == alone
    again = serve(offline)
    assert tokens(again) == alone
    assert sum(result.num_cached_tokens for result in again) > 0
    # a turn of a conversation finds what the one before it computed, windows included
    longest = prompts()[-1] + alone[-1]
    (turn,) = offline.generate([[*longest, 5, 6, 7]], [SamplingParams(max_tokens=2, temperature=0.0)])
    assert turn.num_cached_tokens > len(prompts()[-1]) - 3 * offline.engine.scheduler.kv.layout.step


def small_pool(checkpoint: Path, num_tokens: int, **changes: object) -> OfflineEngine:
    """An engine whose pool holds about num_tokens tokens of all layers, a sixth if all have windows."""
    pages = load(checkpoint, max_model_len=128).loaded.plan.pages
    if all(group.cache.window is not None for group in pages.groups):
        num_tokens //= 6
    num_bytes = (pages.num_pages(num_tokens, in_flight=num_tokens) + 1) * pages.page_bytes
    return load(checkpoint, max_model_len=120, kv_cache_memory_bytes=num_bytes, **changes)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.table
def test_preempted_requests_go_on_as_if_nothing_had_been(
    checkpoint: Path, alone: list[list[int]], depth: int, has_cache: bool
) -> None:
    offline = small_pool(checkpoint, 150, overlap_depth=depth, enable_prefix_caching=has_cache)
    assert tokens(serve(offline)) == alone
    assert offline.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table(most=2)
def test_host_memory_changes_no_token(checkpoint: Path, alone: list[list[int]], depth: int) -> None:
    offline = small_pool(checkpoint, 150, overlap_depth=depth, kv_host_memory_bytes=16 * 2**20)
    for _ in range(2):
        assert tokens(serve(offline)) == alone
    tier = offline.engine.scheduler.kv.tiers.host
    assert tier is not None
    assert tier.num_found_tokens > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.table
def test_drafts_change_no_token(checkpoint: Path, alone: list[list[int]], depth: int) -> None:
    speculative = SpeculativeConfig(num_tokens=4, ngram_min=1, ngram_max=3)
    offline = small_pool(checkpoint, 300, overlap_depth=depth, speculative=speculative)
    assert tokens(serve(offline)) == alone
    assert offline.engine.scheduler.drafts.num_tokens > 0


@pytest.mark.parametrize("kind", ["gemma4_shared", "gemma3", "gpt_oss"])
@pytest.mark.full
def test_two_ranks_give_the_same(kind: str, tmp_path: Path) -> None:
    config = make_config(kind)
    config.max_position_embeddings = 160
    save_checkpoint(tmp_path, config)
    expected = tokens(serve(load(tmp_path)))
    offline = small_pool(tmp_path, 200, tensor_parallel_size=2)
    try:
        assert tokens(serve(offline)) == expected
    finally:
        offline.loaded.close()


def test_adapters_of_a_model_with_windows(tmp_path: Path) -> None:
    config = make_config("gemma3")
    config.max_position_embeddings = 160
    save_checkpoint(tmp_path / "base", config)
    tensors = make_tensors(tmp_path / "base", dict.fromkeys(modules(ATTENTION), 4), seed=3)
    targets = [name.rpartition(".")[2] for name in ATTENTION]
    save_adapter(tmp_path / "lora", tensors, adapter_config(r=4, lora_alpha=24, target_modules=targets))
    save_merged(tmp_path / "merged", tmp_path / "base", tensors, 6.0)
    offline = small_pool(tmp_path / "base", 150, loras=[LoraSource("a", str(tmp_path / "lora"))])
    greedy = [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)] * len(prompts())
    for _ in range(2):
        mixed = tokens(offline.generate(prompts(), greedy, lora_indices=[0, 1] * (len(prompts()) // 2)))
    plain = tokens(load(tmp_path / "base").generate(prompts(), greedy))
    other = tokens(load(tmp_path / "merged").generate(prompts(), greedy))
    assert mixed == [(plain, other)[i % 2][i] for i in range(len(prompts()))]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4_shared", "gemma4_experts", "gpt_oss"])
def test_the_small_model_of_precompilation_has_every_kind_of_layer_and_runs(kind: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_config(kind))
    config = EngineConfig(model=str(tmp_path), device="cpu", block_size=BLOCK, max_num_batched_tokens=24)
    setup = _decide(config, rank=0)
    plan = setup.plan_pool(has_weights=False)
    small = setup.model_config.one_layer_of_each_kind()
    assert {(cache.kind, cache.head_dim) for cache in small.caches} == {
        (cache.kind, cache.head_dim) for cache in setup.model_config.caches
    }
    served: list[LoadedEngine] = []
    serve_small(setup, plan, served.append)
    offline = OfflineEngine(served[0])
    (result,) = offline.generate([list(range(40))], [SamplingParams(max_tokens=8, temperature=0.0)])
    assert result.error is None
    assert len(result.token_ids) == 8
