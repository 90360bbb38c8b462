"""Sizes of a model, computed from its config before any weight is read.

Counts parameters and the values that one token has inside an MLP, estimates the bytes that quantisation saves, lists
the matrices that a scheme may quantise, and checks that a model splits over tensor-parallel ranks. Reads ModelConfig
only: no files and no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from models.errors import ModelError
from models.quantization.config import Scheme, check_share
from models.registry import find_architecture

if TYPE_CHECKING:
    from models.config.model_config import ModelConfig


@dataclass(frozen=True)
class Matrix:
    """One projection. In the checkpoint it may be part of a merged matrix."""

    name: str  # full name in the checkpoint: "model.layers.0.self_attn.q_proj", or "….qkv_proj"
    out_features: int
    in_features: int
    shared: Literal["outputs", "inputs"]  # the dimension that is split over ranks
    is_of_kv_heads: bool = False  # no share is smaller than one KV head


def quantized_matrices(model: ModelConfig) -> Iterator[tuple[Matrix, Scheme]]:
    """Yield each quantised matrix with its scheme."""
    if model.quantization is None:
        return
    for matrix in _linear_layers(model):
        scheme = model.quantization.scheme_of(matrix.name)
        if scheme is not None:
            yield matrix, scheme


def count_parameters(model: ModelConfig, num_experts: int) -> int:
    """Count the parameters with num_experts experts in each sparse layer; tied embeddings count once."""
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
    """Return an upper bound of the values that one token has inside an MLP at one time."""
    widest = 3 * model.intermediate_size if False in model.sparse_layers else 0
    if model.experts is None:
        return widest
    routed = model.experts.num_experts_per_tok * (model.experts.intermediate_size + model.hidden_size)
    return max(widest, routed + 3 * model.experts.shared_intermediate_size + model.hidden_size)


def saved_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes that quantisation saves over storing the same matrices in `dtype`."""
    saved = 0
    for matrix, scheme in quantized_matrices(config):
        saved += matrix.out_features * matrix.in_features * dtype.itemsize
        saved -= scheme.matrix_bytes(matrix.out_features, matrix.in_features, itemsize=dtype.itemsize)
    return saved


def check_split(model: ModelConfig, tp_size: int) -> None:
    """Raise ModelError naming the dimension that tp_size ranks cannot split."""
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
    _check_shares(model, tp_size)


def _check_shares(model: ModelConfig, tp_size: int) -> None:
    """Raise ModelError unless the shares of tp_size ranks end at block boundaries of every scheme."""
    for matrix, scheme in quantized_matrices(model):
        num_shares = min(tp_size, model.num_kv_heads) if matrix.is_of_kv_heads else tp_size
        whole = matrix.out_features if matrix.shared == "outputs" else matrix.in_features
        check_share(scheme, matrix.name, matrix.shared, whole=whole, num_shares=num_shares)


def _linear_layers(model: ModelConfig) -> Iterator[Matrix]:
    """Yield all linear layers but the routed experts, which are never quantised."""
    architecture = find_architecture(model.architecture)
    prefix = "" if architecture.text_prefix is None else f"{architecture.text_prefix}."
    shared = 0 if model.experts is None else model.experts.shared_intermediate_size
    for layer, is_sparse in enumerate(model.sparse_layers):
        matrices = [*_attention(model)]
        if not is_sparse:
            matrices += _mlp("mlp", model.hidden_size, model.intermediate_size)
        elif shared > 0:
            matrices += _mlp("mlp.shared_expert", model.hidden_size, shared)
        for matrix in matrices:
            block, _, projection = matrix.name.rpartition(".")
            stored = architecture.packed_modules.get(projection, projection)
            yield dataclasses.replace(matrix, name=f"{prefix}model.layers.{layer}.{block}.{stored}")


def _attention(model: ModelConfig) -> Iterator[Matrix]:
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield Matrix("self_attn.q_proj", q_size, model.hidden_size, "outputs")
    yield Matrix("self_attn.k_proj", kv_size, model.hidden_size, "outputs", is_of_kv_heads=True)
    yield Matrix("self_attn.v_proj", kv_size, model.hidden_size, "outputs", is_of_kv_heads=True)
    yield Matrix("self_attn.o_proj", model.hidden_size, q_size, "inputs")


def _mlp(block: str, hidden_size: int, width: int) -> Iterator[Matrix]:
    yield Matrix(f"{block}.gate_proj", width, hidden_size, "outputs")
    yield Matrix(f"{block}.up_proj", width, hidden_size, "outputs")
    yield Matrix(f"{block}.down_proj", hidden_size, width, "inputs")
