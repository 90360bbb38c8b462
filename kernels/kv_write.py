"""Writing a step's keys and values into the paged pool."""

from __future__ import annotations

import torch


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store each token's key and value at its slot (block_id * block_size + offset), in place.

    k, v: [T, num_kv_heads, head_dim], of the caches' dtype; k_cache, v_cache: [num_blocks, block_size, num_kv_heads,
    head_dim], contiguous; slot_mapping: [T] int64, every entry a real slot. Tokens of padding share the scratch block's
    slots: which of them is kept there is undefined, and nothing reads it.
    """
    # view, not flatten: a cache that is not contiguous must fail here, not be written as a copy
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, v)
