"""ForwardContext: all inputs of one forward pass but its input ids. Passed as an argument, never a global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.attention.base import AttentionBackend, AttentionMetadata


class LayerKV(NamedTuple):
    """One layer's part of the KV pool."""

    # [num_blocks, block_size, num_kv_heads, head_dim of keys and of values]; blocks may lie apart
    keys: torch.Tensor
    values: torch.Tensor
    table: int = 0  # index of its block table in ForwardContext.attention


@dataclass
class ForwardContext:
    """Positions, caches and attention metadata of one step."""

    # [T] int64: position of each token in its request (for RoPE)
    positions: torch.Tensor
    attention: list[AttentionMetadata]  # by block table
    backend: AttentionBackend
    kv_caches: list[LayerKV]  # by layer; layers that share keys and values have the same
    # [T, layers, size]: inputs of each layer beside the hidden states; set by models that have them
    layer_inputs: torch.Tensor | None = None
