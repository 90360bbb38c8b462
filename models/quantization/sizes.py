"""How much smaller quantised layers make a model: known from its config, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from models.config import ModelConfig


def saved_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the whole model's quantised matrices take less than in `dtype`."""
    if config.quantization is None:
        return 0
    saved = 0
    for layer, out_features, in_features in _linear_layers(config):
        scheme = config.quantization.scheme_of(layer)
        if scheme is not None:
            saved += out_features * in_features * dtype.itemsize
            saved -= scheme.matrix_bytes(out_features, in_features, itemsize=dtype.itemsize)
    return saved


def _linear_layers(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Name, outputs and inputs of each matrix that may be quantised, named as in most checkpoints."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    attention_shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
    }
    dense_shapes = {
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    shared = 0 if config.experts is None else config.experts.shared_intermediate_size
    shared_shapes = {
        "mlp.shared_expert.gate_proj": (shared, hidden),
        "mlp.shared_expert.up_proj": (shared, hidden),
        "mlp.shared_expert.down_proj": (hidden, shared),
    }
    for layer, is_sparse in enumerate(config.sparse_layers):
        # Routed experts are never quantised
        mlp_shapes = dense_shapes if not is_sparse else shared_shapes if shared > 0 else {}
        for name, (out_features, in_features) in (attention_shapes | mlp_shapes).items():
            yield f"model.layers.{layer}.{name}", out_features, in_features
