"""The size of the pool, and what is said when it cannot be."""

from pathlib import Path

import pytest
import torch

from engine.device.device_state import Staging
from engine.device.kv_cache import KVCachePlan, KVPool, allocate_kv_cache, plan_kv_cache
from engine.device.memory import format_size
from engine.device.page_plan import plan_pages
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from models.config.layer_cache import LayerCache
from models.config.model_config import ModelConfig

DEMO = Path(__file__).parents[4] / "models" / "demo" / "checkpoint"
KIB, MIB, GIB = 2**10, 2**20, 2**30
CPU = torch.device("cpu")


def plan(*, free_bytes: int = GIB, **config: object) -> KVCachePlan:
    return plan_kv_cache(
        EngineConfig(model=str(DEMO), **config),
        plan_pages(ModelConfig.from_folder(DEMO).caches, block_size=16, dtype=torch.float32),
        longest=4096,
        max_num_seqs=4,
        free_bytes=free_bytes,
    )


def refusal(**arguments: object) -> str:
    with pytest.raises(StartupError) as info:
        plan(**arguments)
    assert info.value.message[0].isupper() or info.value.message.startswith("--")
    assert info.value.message.endswith(".")
    return info.value.message


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"), (1000, "1000 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1023 * KIB, "1023 KiB"),
        (MIB, "1 MiB"), (MIB + 1, "1 MiB"), (12_345_678, "11.8 MiB"), (GIB, "1 GiB"),
        (123 * GIB + GIB // 2, "123.5 GiB"), (5000 * GIB, "5000 GiB"), (MIB - 1, "1024 KiB"),
    ],
)  # fmt: skip
def test_sizes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_less_than_the_smallest_pool_asks_for_more_memory_and_for_no_shorter_context() -> None:
    message = refusal(kv_cache_memory_bytes=1000)
    assert "1000 bytes" in message
    assert "use a larger --kv-cache-memory" in message
    assert "--max-model-len" not in message
    assert "GiB" not in message
    message = refusal(free_bytes=-5 * MIB)
    assert "0 bytes" in message
    assert "--gpu-memory-utilization" in message
    assert "--max-model-len" not in message


def test_the_size_that_is_asked_for_is_enough() -> None:
    smallest = 3 * plan().bytes_per_page
    assert f"at least {format_size(smallest)}" in refusal(kv_cache_memory_bytes=smallest - 1)
    assert plan(kv_cache_memory_bytes=smallest).max_model_len == 32


def test_a_context_that_does_not_fit_names_the_one_that_does() -> None:
    block = plan().bytes_per_page
    message = refusal(kv_cache_memory_bytes=100 * block, max_model_len=4096)
    assert f"Context 4096 needs {format_size(257 * block)}" in message
    assert format_size(100 * block) in message
    assert "--max-model-len 1584" in message
    assert plan(kv_cache_memory_bytes=100 * block, max_model_len=1584).max_model_len == 1584
    assert plan(kv_cache_memory_bytes=257 * block, max_model_len=4096).max_model_len == 4096


def test_a_context_beyond_the_models_is_refused_and_a_short_one_needs_little() -> None:
    assert "4096" in refusal(max_model_len=4097)
    block = plan().bytes_per_page
    assert plan(kv_cache_memory_bytes=2 * block, max_model_len=8).max_model_len == 8
    assert f"at least {format_size(2 * block)}" in refusal(kv_cache_memory_bytes=2 * block - 1, max_model_len=8)


def test_without_wishes_the_context_shrinks_to_what_fits() -> None:
    block = plan().bytes_per_page
    assert plan(free_bytes=100 * block).max_model_len == 99 * 16


def allocate(num_pages: int, dtype: torch.dtype) -> KVPool:
    model = ModelConfig.from_folder(DEMO)
    pages = plan_pages(model.caches, block_size=16, dtype=dtype)
    return allocate_kv_cache(KVCachePlan(pages, num_pages, 64, 4), model, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pool_of_each_layer_is_its_own_and_holds_zeros_until_it_is_written(dtype: torch.dtype) -> None:
    layers = allocate(5, dtype).layers
    assert len(layers) == 6
    layers[0].keys.fill_(1)
    for tensor in [layers[0].values, *(tensor for layer in layers[1:] for tensor in layer[:2])]:
        assert tensor.shape == (5, 16, 2, 64)
        assert tensor.is_contiguous()
        assert tensor.dtype == dtype
        assert not tensor.any()
    assert layers[0].keys.all()


@pytest.mark.parametrize("num_pages", [2**42, 2**52])
def test_a_pool_that_the_system_refuses_is_a_sentence(num_pages: int) -> None:
    with pytest.raises(StartupError, match="cannot be allocated: use a smaller --kv-cache-memory"):
        allocate(num_pages, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_page_is_zeroed_in_all_layers(dtype: torch.dtype) -> None:
    pool = allocate(5, dtype)
    pool.rows.view(torch.uint8).fill_(56)  # 1.0 in fp8
    pool.zero([1, 4], Staging(CPU, num_bytes=64))
    for layer in pool.layers:
        for tensor in layer[:2]:
            assert [bool(page.float().any()) for page in tensor] == [True, False, True, True, False]


def windows(*, free_bytes: int = 0, max_model_len: int | None = None, limit: int = 4) -> KVCachePlan:
    """A pool of the demo model, a third of whose layers has full attention, and the others a window of 100 tokens."""
    caches = [LayerCache(2, 64, 64, None if layer % 3 == 2 else 100) for layer in range(6)]
    return plan_kv_cache(
        EngineConfig(model=str(DEMO), max_model_len=max_model_len),
        plan_pages(caches, block_size=16, dtype=torch.float32),
        longest=4096,
        max_num_seqs=limit,
        free_bytes=free_bytes,
    )


def test_a_request_of_a_model_with_windows_needs_little_more_in_full_layers_alone() -> None:
    small = windows(free_bytes=2 * MIB)
    assert [group.kind for group in small.groups] == ["full", "window"]
    assert [group.block_tokens for group in small.groups] == [32, 16]
    assert small.groups[1].window == 100
    page = small.bytes_per_page
    assert page == 4 * 2 * 16 * 2 * 64 * 4  # as many tokens of the 4 window layers
    num_pages = 2 * MIB // page
    assert small.num_pages == num_pages
    # a window of 100 tokens takes 9 pages at most; every other page holds 32 tokens of the full layers
    assert small.max_model_len == (num_pages - 1 - 9) * 32
    assert small.num_requests(64) == (num_pages - 1) // (2 + 4)
    assert small.num_requests(small.max_model_len) == 1
    assert small.num_tokens == small.max_model_len
    with pytest.raises(StartupError, match=f"use --max-model-len {small.max_model_len}"):
        windows(free_bytes=2 * MIB, max_model_len=4096)


def test_a_pool_with_windows_is_never_larger_than_if_windows_kept_all() -> None:
    large = windows(free_bytes=GIB, max_model_len=320, limit=3)
    assert large.num_pages == 1 + 3 * (10 + 20)
