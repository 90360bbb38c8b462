"""Sizes of a model, computed from its config before any weight is read.

Counts parameters and the values that one token has inside an MLP, estimates the bytes that quantisation saves, lists
the matrices that a scheme may quantise, and checks that a model splits over tensor-parallel ranks. Reads ModelConfig
only: no files and no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from models.config.mamba2 import Mamba2Config
from models.config.matrix import Matrix
from models.errors import ModelError
from models.quantization.config import Scheme, check_share
from models.quantization.experts_scheme import QuantizesExperts, check_expert_blocks, expert_bytes
from models.registry import find_architecture

if TYPE_CHECKING:
    from models.config.model_config import ModelConfig


def quantized_matrices(model: ModelConfig) -> Iterator[tuple[Matrix, Scheme]]:
    """Yield each quantised matrix with its scheme."""
    if model.quantization is None:
        return
    for matrix in _linear_layers(model):
        scheme = model.quantization.scheme_of(matrix.name)
        if scheme is not None:
            yield matrix, scheme


def quantized_experts(model: ModelConfig) -> Iterator[tuple[Matrix, Scheme, int]]:
    """Yield each matrix of a layer's quantised experts with its scheme and the number of stored experts."""
    experts, quantization = model.experts, model.quantization
    if experts is None or quantization is None:
        return
    architecture = find_architecture(model.architecture)
    width, size = experts.latent_size or model.hidden_size, experts.intermediate_size
    block, _, first = architecture.expert.rpartition(".")
    down = "w2" if first == "w1" else "down_proj"
    num_inner = 1 if experts.gate == "relu2" else 2
    for layer in range(model.num_layers):
        path = f"{_text_prefix(model)}{model.body_prefix}.layers.{layer}.{block}"
        scheme = quantization.scheme_of(f"{path}.{first}") if model.sparse_layers[layer] else None
        if scheme is None or (quantization.is_on_load and not isinstance(scheme, QuantizesExperts)):
            continue
        for _ in range(num_inner):
            yield Matrix(f"{path}.{first}", size, width, "outputs"), scheme, experts.num_stored
        yield Matrix(f"{path}.{down}", width, size, "inputs"), scheme, experts.num_stored


def count_parameters(model: ModelConfig, num_experts: int) -> int:
    """Count the parameters with num_experts experts in each sparse layer; tied embeddings count once."""
    norm = model.hidden_size * (2 if model.norm == "layer_bias" else 1)
    num_inner = 2 if model.has_gated_mlp else 1  # matrices before the activation
    layers = model.num_layers * model.num_layer_norms * norm
    for layer in range(model.num_layers):
        layers += _count_mixers(model, layer)
        if model.has_dense_mlp(layer):
            size = model.mlp_size(layer)
            layers += (num_inner + 1) * model.hidden_size * size
            layers += (num_inner * size + model.hidden_size) * model.has_mlp_bias
            layers += 4 if model.activation == "xielu" else 0
        if model.sparse_layers[layer] and model.experts is not None:
            layers += model.experts.count_parameters(model.hidden_size, num_experts)
    if model.gemma4 is not None:
        has_experts = model.experts is not None
        layers += model.gemma4.count_parameters(model.hidden_size, model.num_layers, has_experts=has_experts)
    embeddings = (
        model.vocab_size * model.hidden_size * (2 if model.has_lm_head and not model.tie_word_embeddings else 1)
    )
    return embeddings + layers + norm + model.vocab_size * model.has_head_bias


def _count_mixers(model: ModelConfig, layer: int) -> int:
    """Count the parameters of a layer's attention and of its recurrence."""
    count = 0 if model.caches[layer] is None else _count_attention(model, layer)
    if model.states[layer] is not None and model.recurrence is not None:
        count += sum(matrix.out_features * matrix.in_features for matrix in _recurrence(model, layer))
        count += model.recurrence.num_other_parameters
    return count


def _count_attention(model: ModelConfig, layer: int) -> int:
    """Count the parameters of a layer's attention."""
    if model.latent is not None:
        return model.latent.count_parameters(hidden_size=model.hidden_size, num_heads=model.num_heads)
    matrices = list(_attention(model, layer))
    count = sum(matrix.out_features * matrix.in_features for matrix in matrices)
    count += sum(matrix.out_features for matrix in matrices[:-1]) * model.has_qkv_bias
    count += model.hidden_size * model.has_output_bias + model.num_heads * model.has_sinks
    heads = matrices[:-2] if len(matrices) == 4 else matrices[:-1]  # queries and keys
    if model.qk_norm == "head":
        count += len(heads) * model.cache(layer).head_dim
    return count + sum(matrix.out_features for matrix in heads) * (model.qk_norm == "width")


def attention_values_per_token(model: ModelConfig) -> int:
    """Return the values that one token has inside attention at one time, without keys and values of few heads."""
    if model.latent is None:
        return 3 * model.num_heads * model.head_dim
    cache = model.latent.layer_cache  # the query as it is and absorbed, alone and with its rotated part; the output
    return model.num_heads * (model.latent.head_dim + 2 * cache.head_dim + cache.v_head_dim)


def mlp_values_per_token(model: ModelConfig) -> int:
    """Return an upper bound of the values that one token has inside an MLP at one time."""
    dense = [layer for layer in range(model.num_layers) if model.has_dense_mlp(layer)]
    widest = max((3 * model.mlp_size(layer) for layer in dense), default=0)
    if model.experts is None:
        return widest
    routed = model.experts.num_experts_per_tok * (model.experts.intermediate_size + model.hidden_size)
    return max(widest, routed + 3 * model.experts.shared_intermediate_size + model.hidden_size)


def saved_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """Return the bytes that quantisation saves over storing the same matrices in `dtype`.

    device: which may take experts in planes of whole groups of inputs; None: none does.
    """
    arranges = device if config.gemma4 is None else None  # models/gemma4.py arranges none
    saved = 0
    for matrix, scheme in quantized_matrices(config):
        if matrix.is_expanded:
            continue
        saved += matrix.out_features * matrix.in_features * dtype.itemsize
        saved -= scheme.matrix_bytes(matrix.out_features, matrix.in_features, itemsize=dtype.itemsize)
    for matrix, scheme, count in quantized_experts(config):
        dense = matrix.out_features * matrix.in_features * dtype.itemsize
        packed = expert_bytes(scheme, matrix.out_features, matrix.in_features, dtype=dtype, device=arranges)
        saved += count * (dense - packed)
    return saved


def check_split(model: ModelConfig, tp_size: int, *, is_expert_parallel: bool = False) -> None:
    """Raise ModelError naming the dimension that tp_size ranks cannot split."""
    if is_expert_parallel:
        _check_expert_parallel(model, tp_size)
    counts, of_expert = {"num_heads": model.num_heads}, "intermediate_size of each expert"
    if any(model.has_dense_mlp(layer) for layer in range(model.num_layers)):
        counts["intermediate_size"] = model.intermediate_size
    if model.experts is not None:
        if not is_expert_parallel:
            counts[of_expert] = model.experts.intermediate_size
        counts["shared_expert_intermediate_size"] = model.experts.shared_intermediate_size
    if model.recurrence is not None:
        counts |= model.recurrence.head_counts
    odd = [name for name, count in counts.items() if count % tp_size != 0]
    if odd:
        remedy = ": use --expert-parallel" if odd == [of_expert] and _has_expert_for_each(model, tp_size) else ""
        raise ModelError(f"{model.architecture}: {odd[0]} {counts[odd[0]]} does not split over {tp_size} ranks{remedy}")
    if isinstance(model.recurrence, Mamba2Config):
        num_groups = model.recurrence.num_groups
        if num_groups % tp_size != 0 and tp_size % num_groups != 0:
            raise ModelError(
                f"{model.architecture}: {num_groups} groups of Mamba-2 neither split over {tp_size} ranks nor divide"
                " them, so they cannot be replicated"
            )
    for num_kv_heads in dict.fromkeys(cache.num_kv_heads for cache in model.kv_caches):
        if num_kv_heads % tp_size != 0 and tp_size % num_kv_heads != 0:
            raise ModelError(
                f"{model.architecture}: num_kv_heads {num_kv_heads} neither splits over {tp_size} ranks"
                " nor divides them, so its heads cannot be replicated"
            )
    _check_shares(model, tp_size, is_expert_parallel=is_expert_parallel)


def _check_expert_parallel(model: ModelConfig, tp_size: int) -> None:
    """Raise ModelError unless each of tp_size ranks can have a whole expert."""
    if tp_size == 1:
        raise ModelError(
            "--expert-parallel divides the experts among GPUs, and --tensor-parallel-size is 1: it must be at least 2"
        )
    if model.experts is None:
        raise ModelError(
            f"--expert-parallel: {model.architecture} has no experts: --tensor-parallel-size {tp_size} alone splits it"
        )
    if not _has_expert_for_each(model, tp_size):
        raise ModelError(
            f"--expert-parallel: {model.architecture} has {model.experts.num_experts} experts, and each rank needs one:"
            f" --tensor-parallel-size {tp_size} must be at most {model.experts.num_experts}"
        )


def _has_expert_for_each(model: ModelConfig, tp_size: int) -> bool:
    """Return True if each of tp_size ranks can have a whole expert."""
    return model.experts is not None and model.experts.num_experts >= tp_size


def _check_shares(model: ModelConfig, tp_size: int, *, is_expert_parallel: bool) -> None:
    """Raise ModelError unless the shares of tp_size ranks end at block boundaries of every scheme."""
    for matrix, scheme in quantized_matrices(model):
        num_shares = min(tp_size, matrix.num_kv_heads) if matrix.num_kv_heads else tp_size
        whole = matrix.out_features if matrix.shared == "outputs" else matrix.in_features
        check_share(scheme, matrix.name, matrix.shared, whole=whole, num_shares=num_shares)
    remedy = f"use {'--expert-parallel or ' * _has_expert_for_each(model, tp_size)}fewer ranks"
    for matrix, scheme, _ in quantized_experts(model):
        check_expert_blocks(scheme, matrix.name, matrix.in_features)
        whole = matrix.out_features if matrix.shared == "outputs" else matrix.in_features
        num_shares = 1 if is_expert_parallel else tp_size
        check_share(scheme, matrix.name, matrix.shared, whole=whole, num_shares=num_shares, remedy=remedy)


def _linear_layers(model: ModelConfig) -> Iterator[Matrix]:
    """Yield all linear layers but the routed experts."""
    architecture = find_architecture(model.architecture)
    shared = 0 if model.experts is None else model.experts.shared_intermediate_size
    for layer in range(model.num_layers):
        matrices = [*_attention(model, layer), *_recurrence(model, layer)]
        if model.has_dense_mlp(layer):
            size = model.mlp_size(layer)
            matrices += _mlp(architecture.mlp, model.hidden_size, size, has_gate=model.has_gated_mlp)
        elif model.sparse_layers[layer] and shared > 0:
            matrices += _mlp(architecture.shared_expert, model.hidden_size, shared, has_gate=model.has_gated_mlp)
        if model.sparse_layers[layer] and model.experts is not None:
            matrices += model.experts.latent_matrices(architecture.mlp, model.hidden_size)
        for matrix in matrices:
            block, _, projection = matrix.name.rpartition(".")
            stored = architecture.packed_modules.get(projection, projection)
            name = f"{_text_prefix(model)}{model.body_prefix}.layers.{layer}.{block}.{stored}"
            yield dataclasses.replace(matrix, name=name)


def _text_prefix(model: ModelConfig) -> str:
    prefix = find_architecture(model.architecture).text_prefix
    return "" if prefix is None else f"{prefix}."


def _attention(model: ModelConfig, layer: int) -> Iterator[Matrix]:
    if model.caches[layer] is None:
        return
    cache, block = model.cache(layer), find_architecture(model.architecture).attention
    if model.latent is not None:
        yield from model.latent.matrices(block, hidden_size=model.hidden_size, num_heads=model.num_heads)
        return
    q_size = model.num_heads * cache.head_dim * (2 if model.has_output_gate else 1)
    sizes = {"k_proj": cache.num_kv_heads * cache.head_dim, "v_proj": cache.num_kv_heads * cache.v_head_dim}
    for name in model.projections(layer):
        kv_heads = cache.num_kv_heads if name in sizes else 0
        yield Matrix(f"{block}.{name}", sizes.get(name, q_size), model.hidden_size, "outputs", num_kv_heads=kv_heads)
    yield Matrix(f"{block}.o_proj", model.hidden_size, model.num_heads * cache.v_head_dim, "inputs")


def _recurrence(model: ModelConfig, layer: int) -> Iterator[Matrix]:
    if model.states[layer] is not None and model.recurrence is not None:
        yield from model.recurrence.matrices(model.hidden_size)


def _mlp(block: str, hidden_size: int, width: int, *, has_gate: bool = True) -> Iterator[Matrix]:
    if has_gate:
        yield Matrix(f"{block}.gate_proj", width, hidden_size, "outputs")
    yield Matrix(f"{block}.up_proj", width, hidden_size, "outputs")
    yield Matrix(f"{block}.down_proj", hidden_size, width, "inputs")
