"""How large the paged KV pool is, and its tensors. Sees memory and shapes; knows nothing of requests.

By default memory fits itself: the pool takes what the device can spare, and the context shrinks to what one request
can hold, which is said aloud. Whatever the user asked for explicitly is met or refused, never shrunk in silence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import StartupError
from models.config import ModelConfig

logger = logging.getLogger(__name__)

GIB = 1024**3
_UNITS = (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024))
_MIN_BLOCKS = 2  # of one request; a shorter context than that serves nobody
# Without a limit of its own, a CPU daemon takes this share of the memory that is free when it starts.
_HOST_SHARE = 0.4


@dataclass(frozen=True)
class KVCachePlan:
    """The pool's size. num_blocks includes block 0, which belongs to padding."""

    num_blocks: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    bytes_per_block: int

    @property
    def num_tokens(self) -> int:
        """Tokens that requests can hold together."""
        return (self.num_blocks - 1) * self.block_size


def plan_kv_cache(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    block_size: int,
    max_num_seqs: int,
    free_bytes: int,
) -> KVCachePlan:
    """Size the pool from `free_bytes`. Raises StartupError naming what fits and the flag that changes it."""
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
    # More than every running request at full length is never used
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
    if fitting_len < wanted_len:
        logger.warning(
            "max_model_len=%d reduced from %d: that is what %s of KV cache holds",
            fitting_len,
            wanted_len,
            format_size(budget),
        )
    return KVCachePlan(usable_blocks + 1, block_size, min(wanted_len, fitting_len), bytes_per_block)


def free_bytes(config: EngineConfig, device: torch.device, *, reserve_bytes: int) -> int:
    """Return the bytes the pool may take on `device` now, weights being loaded. reserve_bytes: for activations."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - total * (1 - config.gpu_memory_utilization)) - reserve_bytes
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return int(total * config.gpu_memory_utilization) - torch.mps.current_allocated_memory() - reserve_bytes
    return int(_host_memory_bytes() * _HOST_SHARE)


def allocate_kv_cache(
    plan: KVCachePlan, model: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return one (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim], zeroed.

    Zeros, since masked attention multiplies what it does not read by 0, and 0 × NaN is NaN.
    """
    shape = (2, plan.num_blocks, plan.block_size, model.num_kv_heads, model.head_dim)
    try:
        layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]
    except (RuntimeError, torch.OutOfMemoryError) as error:
        size = format_size(plan.bytes_per_block * plan.num_blocks)
        raise StartupError(f"The KV cache of {size} cannot be allocated: use a smaller --kv-cache-memory.") from error
    return [(layer[0], layer[1]) for layer in layers]


def format_size(num_bytes: int) -> str:
    """Return a size for people: "1.5 KiB", "16 MiB", "1000 bytes"."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{max(num_bytes, 0)} bytes"


def _what_there_is(config: EngineConfig, budget: int) -> str:
    if config.kv_cache_memory_bytes is not None:
        return f"--kv-cache-memory gives {format_size(budget)}"
    return f"and {format_size(budget)} are free"


def _more_memory(config: EngineConfig) -> str:
    if config.kv_cache_memory_bytes is not None:
        return "a larger --kv-cache-memory"
    return "a larger --gpu-memory-utilization or --kv-cache-memory"


def _host_memory_bytes() -> int:
    """Memory this process may still take: the system's available memory, or its cgroup's limit if that is less."""
    available = 4 * GIB
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(int(text) - int(used.read_text()), 0))
    return available
