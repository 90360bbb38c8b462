"""Mixtures of experts of MiniMax-M2, Command A+ and Mistral 4: what a config.json says of their routing and layers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from models.errors import ModelError
from models.fields import Fields

if TYPE_CHECKING:
    from models.config.experts import ExpertsConfig


def read_minimax(experts: ExpertsConfig) -> ExpertsConfig:
    """Return MiniMax-M2's routing (transformers, MiniMaxM2TopKRouter); published routers are fp32."""
    return dataclasses.replace(
        experts, norm_topk_prob=True, rounds_weights=False, routing="sigmoid_bias", router_precision="fp32_stored"
    )


def read_cohere(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Return the routing and shared experts of Command A+ (transformers, Cohere2MoeTopKRouter). Raises ModelError."""
    kind, strategy = config.get("expert_selection_fn"), config.get("shared_expert_combination_strategy")
    if kind not in ("softmax", "sigmoid"):
        raise ModelError(
            f"{config.where}: expert_selection_fn {kind!r} is not supported: served are 'softmax' and 'sigmoid'"
        )
    if strategy not in ("average", "sum"):
        raise ModelError(
            f"{config.where}: shared_expert_combination_strategy {strategy!r} is not supported: served are 'average'"
            " and 'sum'"
        )
    is_normalised = config.flag("norm_topk_prob")  # of sigmoids; a softmax is over the chosen experts alone
    num_shared = config.count("num_shared_experts") if config.get("num_shared_experts") else 0
    return dataclasses.replace(
        experts,
        routing="softmax" if kind == "softmax" else "chosen_sigmoid",
        norm_topk_prob=kind == "softmax" or is_normalised,
        shared_intermediate_size=num_shared * experts.intermediate_size,
        averages_shared=strategy == "average",
    )


def read_sparse_kinds(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts: by its kind, by is_moe_layer, or all but the first few.

    The last two are the spellings of published files of EXAONE-MoE and Command A+. Raises ModelError.
    """
    kinds, listed = config.get("mlp_layer_types"), config.get("is_moe_layer")
    config.pass_over("first_k_dense_replace")
    if kinds is not None:
        if not _is_list(kinds, num_layers, ("dense", "sparse")):
            raise ModelError(
                f"{config.where}: mlp_layer_types must be a list of 'dense' and 'sparse' for {num_layers} layers, found"
                f" {kinds!r}"
            )
        return tuple(kind == "sparse" for kind in kinds)
    if listed is not None:
        if not _is_list(listed, num_layers, (False, True)):
            raise ModelError(
                f"{config.where}: is_moe_layer must be a list of true and false for {num_layers} layers, found"
                f" {listed!r}"
            )
        return tuple(map(bool, listed))
    return tuple(layer >= num_dense_layers(config) for layer in range(num_layers))


def num_dense_layers(config: Fields) -> int:
    """Read the number of layers without experts, which are the first."""
    return 0 if config.get("first_k_dense_replace") in (0, None) else config.count("first_k_dense_replace")


def _is_list(value: object, length: int, values: tuple[object, ...]) -> bool:
    return isinstance(value, list) and len(value) == length and all(each in values for each in value)
