"""How large a model is, by its config: parameters, and the values that a token has inside an MLP.

How much smaller quantised layers make a model: known from its config, before any weight is read.

Whether a model splits over ranks, by its config: before a rank starts, or a weight is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from models.config.matrices import check_shares, quantized_matrices
from models.errors import ModelError

if TYPE_CHECKING:
    from models.config.model_config import ModelConfig


def count_parameters(model: ModelConfig, num_experts: int) -> int:
    """Parameters of the whole model with num_experts experts in each sparse layer, tied embeddings counted once."""
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (2 * q_size + 2 * kv_size)
    attention += (q_size + 2 * kv_size) * model.has_qkv_bias + model.hidden_size * model.has_output_bias
    attention += {"none": 0, "head": 2 * model.head_dim, "width": q_size + kv_size}[model.qk_norm]
    mlp = 3 * model.hidden_size * model.intermediate_size
    mlp += (2 * model.intermediate_size + model.hidden_size) * model.has_mlp_bias
    layers = model.num_layers * (attention + model.num_layer_norms * model.hidden_size)
    layers += model.sparse_layers.count(False) * mlp
    if model.experts is not None:
        layers += model.sparse_layers.count(True) * model.experts.count_parameters(model.hidden_size, num_experts)
    embeddings = (
        model.vocab_size * model.hidden_size * (2 if model.has_lm_head and not model.tie_word_embeddings else 1)
    )
    return embeddings + layers + model.hidden_size


def mlp_values_per_token(model: ModelConfig) -> int:
    """Upper bound of the values that one token has at once inside an MLP."""
    widest = 3 * model.intermediate_size if False in model.sparse_layers else 0
    if model.experts is None:
        return widest
    routed = model.experts.num_experts_per_tok * (model.experts.intermediate_size + model.hidden_size)
    return max(widest, routed + 3 * model.experts.shared_intermediate_size + model.hidden_size)


def saved_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the whole model's quantised matrices take less than in `dtype`."""
    saved = 0
    for matrix, scheme in quantized_matrices(config):
        saved += matrix.out_features * matrix.in_features * dtype.itemsize
        saved -= scheme.matrix_bytes(matrix.out_features, matrix.in_features, itemsize=dtype.itemsize)
    return saved


def check_split(model: ModelConfig, tp_size: int) -> None:
    """Raise ModelError naming what tp_size ranks cannot share."""
    counts = {"num_heads": model.num_heads}
    if False in model.sparse_layers:
        counts["intermediate_size"] = model.intermediate_size
    if model.experts is not None:
        counts["intermediate_size of each expert"] = model.experts.intermediate_size
        counts["shared_expert_intermediate_size"] = model.experts.shared_intermediate_size
    for name, count in counts.items():
        if count % tp_size != 0:
            raise ModelError(f"{model.architecture}: {name} {count} does not split over {tp_size} ranks")
    if model.num_kv_heads % tp_size != 0 and tp_size % model.num_kv_heads != 0:
        raise ModelError(
            f"{model.architecture}: num_kv_heads {model.num_kv_heads} neither splits over {tp_size} ranks"
            " nor divides them, so its heads cannot be replicated"
        )
    check_shares(model, tp_size)
