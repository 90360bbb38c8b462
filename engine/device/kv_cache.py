"""plan_kv_cache() sizes the paged KV pool; allocate_kv_cache() allocates its tensors. Imports torch.

By default the pool takes all memory that the device can spare, and the context limit shrinks to what the pool holds for
one request; the engine logs this. An explicit setting is met or refused, never reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.device.memory import format_size, zeros
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from models.config.model_config import ModelConfig

_MIN_BLOCKS = 2  # minimum for one request; a shorter context is useless


@dataclass(frozen=True)
class KVCachePlan:
    """The pool's size. num_blocks includes block 0, which is for padding."""

    num_blocks: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    bytes_per_block: int

    @property
    def num_tokens(self) -> int:
        """The pool's capacity, in tokens of all requests together."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_bytes(self) -> int:
        """The pool's size in bytes, padding included."""
        return self.num_blocks * self.bytes_per_block


def smallest_pool_bytes(config: EngineConfig, model: ModelConfig, *, dtype: torch.dtype, block_size: int) -> int:
    """Return the bytes of a pool that holds one short request, or the configured size."""
    least_blocks = min(-(-(config.max_model_len or model.max_context_len) // block_size), _MIN_BLOCKS)
    least = (least_blocks + 1) * model.kv_bytes_per_token(1, dtype) * block_size
    return config.kv_cache_memory_bytes or least


def plan_kv_cache(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    block_size: int,
    max_num_seqs: int,
    free_bytes: int,
) -> KVCachePlan:
    """Size the pool from `free_bytes`. Raises StartupError, which names the size that fits and the flag to change."""
    bytes_per_block = model.kv_bytes_per_token(1, dtype) * block_size
    longest = model.max_context_len
    if config.max_model_len is not None and config.max_model_len > longest:
        raise StartupError(
            f"--max-model-len {config.max_model_len} exceeds the {longest} tokens this model's positions reach."
        )
    budget = config.kv_cache_memory_bytes if config.kv_cache_memory_bytes is not None else free_bytes
    wanted_len = config.max_model_len or longest
    wanted_blocks = -(-wanted_len // block_size)
    usable_blocks = max(budget // bytes_per_block - 1, 0)
    # Running requests never use more than this, even at full length
    usable_blocks = min(usable_blocks, max_num_seqs * wanted_blocks)
    fitting_len = usable_blocks * block_size
    least_blocks = min(wanted_blocks, _MIN_BLOCKS)
    if usable_blocks < least_blocks:
        least = format_size((least_blocks + 1) * bytes_per_block)
        raise StartupError(
            f"The KV cache needs at least {least}, {_what_there_is(config, budget)}: use {_more_memory(config)}."
        )
    if config.max_model_len is not None and fitting_len < wanted_len:
        raise StartupError(
            f"Context {wanted_len} needs {format_size((wanted_blocks + 1) * bytes_per_block)} of KV cache, "
            f"{_what_there_is(config, budget)}: use --max-model-len {fitting_len}, or {_more_memory(config)}."
        )
    return KVCachePlan(usable_blocks + 1, block_size, min(wanted_len, fitting_len), bytes_per_block)


def allocate_kv_cache(
    plan: KVCachePlan, model: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return one (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim], zeroed.

    Quire's attention never counts masked slots; flash-attn may, as 0 × value, so that unwritten ones must be finite.
    """
    shape = (2, plan.num_blocks, plan.block_size, model.num_kv_heads, model.head_dim)
    try:
        layers = [zeros(shape, dtype, device) for _ in range(model.num_layers)]
    except (RuntimeError, OSError, OverflowError) as error:  # torch.OutOfMemoryError is a RuntimeError; others: mmap
        size = format_size(plan.num_bytes)
        raise StartupError(f"The KV cache of {size} cannot be allocated: use a smaller --kv-cache-memory.") from error
    return [(layer[0], layer[1]) for layer in layers]


def _what_there_is(config: EngineConfig, budget: int) -> str:
    if config.kv_cache_memory_bytes is not None:
        return f"--kv-cache-memory gives {format_size(budget)}"
    return f"and {format_size(budget)} are free"


def _more_memory(config: EngineConfig) -> str:
    if config.kv_cache_memory_bytes is not None:
        return "a larger --kv-cache-memory"
    return "a larger --gpu-memory-utilization or --kv-cache-memory"
