"""How large a model is, by its config: parameters, and the values that a token has inside an MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
