"""ForwardContext: all inputs of one forward pass but its input ids. Passed as an argument, never a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention.base import AttentionBackend, AttentionMetadata


@dataclass
class ForwardContext:
    """Positions, caches and attention metadata of one step, the same for every layer."""

    # [T] int64: position of each token in its request (for RoPE)
    positions: torch.Tensor
    attention: AttentionMetadata
    backend: AttentionBackend
    # one (k_cache, v_cache) per layer, each [num_blocks, block_size, num_kv_heads, head_dim]
    kv_caches: list[tuple[torch.Tensor, torch.Tensor]]
