"""Writing a step's keys and values into the paged pool, which holds them in their own dtype or in fp8."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float()


@dataclass(frozen=True)
class KVScales:
    """What the numbers of one layer's fp8 pool stand for: each times its scale. In any other pool both are 1."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales = UNSCALED,
) -> None:
    """Store each token's key and value at its slot (block_id * block_size + offset), in place.

    k, v: [T, num_kv_heads, head_dim], of the caches' dtype unless that is FP8; k_cache, v_cache: [num_blocks,
    block_size, num_kv_heads, head_dim], contiguous; slot_mapping: [T] int64, every entry a real slot. FP8 holds
    k / scales.k, rounded to nearest even; what exceeds ±448 becomes that. Tokens of padding share the scratch block's
    slots: which of them is kept there is undefined, and nothing reads it.
    """
    for x, cache, scale in ((k, k_cache, scales.k), (v, v_cache, scales.v)):
        # view, not flatten: a cache that is not contiguous must fail here, not be written as a copy
        slots = cache.view(-1, *cache.shape[2:])
        if cache.dtype == FP8:  # torch copies its bytes by index on every device, its numbers not on the CPU
            slots, x = slots.view(torch.uint8), to_fp8(x, scale).view(torch.uint8)
        slots.index_copy_(0, slot_mapping, x)


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in FP8, of any shape. Clamped first: outside of its range torch's conversion may give NaN."""
    return (x.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def from_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of x, which is contiguous, in another dtype: all that are served hold them exactly."""
    if x.device.type != "cpu":
        return x.to(dtype)
    # torch's conversion is a scalar loop on the CPU: a table is six times as fast
    return _VALUES.to(dtype).index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)
