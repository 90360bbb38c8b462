"""FAMILIES: for each family with mixtures of experts, a function that adds its routing and its shared experts.

It gets the fields of a config.json, and the ExpertsConfig of what all families state alike; it raises ModelError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from models.errors import ModelError
from models.fields import Fields

if TYPE_CHECKING:
    from models.config.experts import ExpertsConfig


def _read_minimax(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Return MiniMax-M2's routing (transformers, MiniMaxM2TopKRouter); published routers are fp32."""
    return dataclasses.replace(
        experts, norm_topk_prob=True, rounds_weights=False, routing="sigmoid_bias", router_precision="fp32_stored"
    )


def _read_cohere(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
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


def _read_gemma4(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    return dataclasses.replace(experts, has_dense_mlp=True, gate="gelu_tanh")


def _read_gpt_oss(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    alpha, limit = config.positive("swiglu_alpha", default=1.702), config.positive("swiglu_limit", default=7.0)
    return dataclasses.replace(experts, has_bias=True, gate="clamped", gate_alpha=alpha, gate_limit=limit)


def _read_qwen2(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    width = config.count("shared_expert_intermediate_size")
    return dataclasses.replace(experts, shared_intermediate_size=width, has_shared_gate=True)


def _read_granite(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    width = config.count("shared_intermediate_size") if config.get("shared_intermediate_size") else 0
    return dataclasses.replace(experts, shared_intermediate_size=width)


def _read_hunyuan(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    width = experts.intermediate_size
    return dataclasses.replace(experts, shared_intermediate_size=width, router_precision="fp32_stored")


def _read_ernie(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    floor, num_shared = config.positive("moe_norm_min", default=1e-12), config.get("moe_num_shared_experts")
    shared = experts.intermediate_size * config.count("moe_num_shared_experts") if num_shared else 0
    return dataclasses.replace(
        experts,
        routing="softmax_bias",
        router_precision="fp32_stored",
        floor=floor,
        shared_intermediate_size=shared,
        num_biases=2 * shared + config.count("hidden_size") if shared and config.flag("mlp_bias") else 0,
    )


def _read_llama4(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    return dataclasses.replace(experts, routing="scaled_input", shared_intermediate_size=experts.intermediate_size)


def _read_lfm2(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    return dataclasses.replace(
        experts,
        routing="sigmoid_bias" if config.flag("use_expert_bias", default=True) else "sigmoid",
        added=1e-6,
        factor=config.positive("routed_scaling_factor", default=1.0),
    )


def _read_mistral4(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    num_groups, num_open = _count_groups(config, experts, least=2)
    return dataclasses.replace(
        experts,
        added=1e-20,
        factor=config.positive("routed_scaling_factor", default=1.0),
        num_groups=num_groups,
        num_groups_per_tok=num_open,
        shared_intermediate_size=_read_shared_size(config, experts),
    )


def _read_nemotron(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Add what Nemotron-H has beside DeepSeek-V3's routing: no gates, a latent size, a shared expert of its width."""
    experts = _read_groups(config, experts)
    hidden_size, shared = config.count("hidden_size"), config.count("moe_shared_expert_intermediate_size")
    latent = 0 if config.get("moe_latent_size") is None else config.count("moe_latent_size")
    num_biases = shared + hidden_size + (latent + hidden_size if latent else 0)
    return dataclasses.replace(
        experts,
        gate="relu2",
        shared_intermediate_size=shared,
        latent_size=latent,
        num_biases=num_biases if config.flag("mlp_bias") else 0,
    )


def _read_sparsemixer(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    if experts.num_experts_per_tok != 2:
        raise ModelError(
            f"{config.where}: num_experts_per_tok {experts.num_experts_per_tok} is not supported: this router chooses 2"
        )
    jitter = config.number("router_jitter_noise", default=0.01)
    return dataclasses.replace(experts, routing="sparsemixer", jitter=jitter)


def _read_deepseek2(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Add DeepSeek-V2's routing (arXiv:2405.04434, §2.2; transformers, DeepseekV2TopkRouter) and shared experts."""
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"{config.where}: topk_method {method!r} is not supported: served are 'greedy' and 'group_limited_greedy'"
        )
    if method == "greedy":
        config.pass_over("n_group", "topk_group")
    num_groups, num_open = (1, 1) if method == "greedy" else _count_groups(config, experts, least=1)
    shared = _read_shared_size(config, experts)
    return dataclasses.replace(
        experts,
        router_precision="fp32",
        factor=config.positive("routed_scaling_factor", default=1.0),
        num_groups=num_groups,
        num_groups_per_tok=num_open,
        num_best_of_group=1,
        shared_intermediate_size=shared,
        num_biases=2 * shared + config.count("hidden_size") if shared and config.flag("mlp_bias") else 0,
    )


def _read_groups(config: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """Add DeepSeek-V3's routing (arXiv:2412.19437, §2.1.2) and shared experts."""
    num_groups, num_open = _count_groups(config, experts, least=2)
    return dataclasses.replace(
        experts,
        routing="sigmoid_bias",
        router_precision="fp32",
        floor=1e-20,
        factor=config.positive("routed_scaling_factor", default=1.0),
        num_groups=num_groups,
        num_groups_per_tok=num_open,
        shared_intermediate_size=_read_shared_size(config, experts),
    )


def _read_shared_size(config: Fields, experts: ExpertsConfig) -> int:
    """Return the width of n_shared_experts side by side."""
    return experts.intermediate_size * config.count("n_shared_experts") if config.get("n_shared_experts") else 0


def _count_groups(config: Fields, experts: ExpertsConfig, *, least: int) -> tuple[int, int]:
    """Read the numbers of groups of experts, and of those open to a token. least: experts of a group."""
    num_groups, num_open = config.count("n_group", default=1), config.count("topk_group", default=1)
    size = experts.num_experts // num_groups
    if experts.num_experts % num_groups != 0 or (num_groups > 1 and size < least):
        raise ModelError(
            f"{config.where}: {config.name_of('n_group')} {num_groups} does not cut {experts.num_experts} experts into"
            f" groups of {least} or more"
        )
    if num_open > num_groups or (num_groups > 1 and num_open * size < experts.num_experts_per_tok):
        raise ModelError(
            f"{config.where}: topk_group {num_open} of {config.name_of('n_group')} {num_groups} leaves"
            f" {min(num_open, num_groups) * size} experts for {config.name_of('num_experts_per_tok')}"
            f" {experts.num_experts_per_tok}"
        )
    return num_groups, num_open


# By Architecture.experts; a kind that is not here has nothing of its own
FAMILIES: Mapping[str, Callable[[Fields, ExpertsConfig], ExpertsConfig]] = {
    "cohere2": _read_cohere,
    "deepseek2": _read_deepseek2,
    "ernie4_5": _read_ernie,
    "exaone": _read_groups,
    "gemma4": _read_gemma4,
    "glm": _read_groups,
    "glm_lite": _read_groups,
    "gpt_oss": _read_gpt_oss,
    "granite": _read_granite,
    "hunyuan": _read_hunyuan,
    "kimi": _read_groups,
    "lfm2": _read_lfm2,
    "llama4": _read_llama4,
    "minimax": _read_minimax,
    "mistral4": _read_mistral4,
    "nemotron": _read_nemotron,
    "phimoe": _read_sparsemixer,
    "qwen2": _read_qwen2,
    "qwen3_5": _read_qwen2,
}
