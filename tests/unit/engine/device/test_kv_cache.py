"""The size of the pool, and what is said when it cannot be."""

from pathlib import Path

import pytest
import torch

from engine.device.kv_cache import KVCachePlan, allocate_kv_cache, plan_kv_cache
from engine.device.memory import format_size
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from models.config.model_config import ModelConfig

DEMO = Path(__file__).parents[4] / "models" / "demo" / "checkpoint"
KIB, MIB, GIB = 2**10, 2**20, 2**30


def plan(*, free_bytes: int = GIB, **config: object) -> KVCachePlan:
    return plan_kv_cache(
        EngineConfig(model=str(DEMO), **config),
        ModelConfig.from_folder(DEMO),
        dtype=torch.float32,
        block_size=16,
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
    smallest = 3 * plan().bytes_per_block
    assert f"at least {format_size(smallest)}" in refusal(kv_cache_memory_bytes=smallest - 1)
    assert plan(kv_cache_memory_bytes=smallest).max_model_len == 32


def test_a_context_that_does_not_fit_names_the_one_that_does() -> None:
    block = plan().bytes_per_block
    message = refusal(kv_cache_memory_bytes=100 * block, max_model_len=4096)
    assert f"Context 4096 needs {format_size(257 * block)}" in message
    assert format_size(100 * block) in message
    assert "--max-model-len 1584" in message
    assert plan(kv_cache_memory_bytes=100 * block, max_model_len=1584).max_model_len == 1584
    assert plan(kv_cache_memory_bytes=257 * block, max_model_len=4096).max_model_len == 4096


def test_a_context_beyond_the_models_is_refused_and_a_short_one_needs_little() -> None:
    assert "4096" in refusal(max_model_len=4097)
    block = plan().bytes_per_block
    assert plan(kv_cache_memory_bytes=2 * block, max_model_len=8).max_model_len == 8
    assert f"at least {format_size(2 * block)}" in refusal(kv_cache_memory_bytes=2 * block - 1, max_model_len=8)


def test_without_wishes_the_context_shrinks_to_what_fits() -> None:
    block = plan().bytes_per_block
    assert plan(free_bytes=100 * block).max_model_len == 99 * 16


def allocate(num_blocks: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pool = KVCachePlan(num_blocks=num_blocks, block_size=16, max_model_len=64, bytes_per_block=1024)
    return allocate_kv_cache(pool, ModelConfig.from_folder(DEMO), dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pool_of_each_layer_is_its_own_and_holds_zeros_until_it_is_written(dtype: torch.dtype) -> None:
    layers = allocate(5, dtype)
    assert len(layers) == 6
    layers[0][0].fill_(1)
    for tensor in [layers[0][1], *(tensor for layer in layers[1:] for tensor in layer)]:
        assert tensor.shape == (5, 16, 2, 64)
        assert tensor.dtype == dtype
        assert not tensor.any()
    assert layers[0][0].all()


@pytest.mark.parametrize("num_blocks", [2**42, 2**52])
def test_a_pool_that_the_system_refuses_is_a_sentence(num_blocks: int) -> None:
    with pytest.raises(StartupError, match="cannot be allocated: use a smaller --kv-cache-memory"):
        allocate(num_blocks, torch.float32)
