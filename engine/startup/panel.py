"""describe_setup(): the rows of the start-up panel, of a model that is loaded. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.device.kv_cache import KVCachePlan
from engine.device.memory import format_size
from engine.device.model_runner import ModelRunner
from engine.interface.config import EngineConfig
from engine.startup.device_choice import describe_device
from engine.startup.host_memory import describe_tiers
from engine.startup.setup import Setup
from kernels.attention.base import AttentionBackend
from kernels.dispatch import HAS_TRITON
from kernels.elementwise.reference import FP8, INT8
from kernels.native.library import loaded
from models.build import Model
from models.config.model_config import ModelConfig
from models.foreign.choose import describe_class
from models.layers.attention import SelfAttention
from models.layers.causal_lm import CausalLM
from models.registry import whole_of_text_part

logger = logging.getLogger(__name__)

# Qwen2 has keys of hundreds, and fails with fp8 (github.com/QwenLM/Qwen3/issues/840); from 64 on, fp8's steps are 8
_MAX_KEY_BIAS = 64.0


def describe_setup(
    setup: Setup,
    plan: KVCachePlan,
    model: Model,
    *,
    backends: Sequence[type[AttentionBackend]],
    weights_s: float,
) -> dict[str, str]:
    """Return the panel's rows, label → text. backends: in order of preference. weights_s: time to load the weights."""
    config, quantization, size = setup.config, setup.model_config.describe_quantization(), setup.tp.size
    kind = quantization or name_of(setup.dtype)
    each = "" if size == 1 else f" on each of {size}"
    facts = {
        "Model": _describe_model(setup.model_config),
        "Device": describe_device(setup.device) if size == 1 else f"{size} × {describe_device(setup.device)}",
        "Weights": f"{format_size(setup.weight_bytes)}{each} {kind} in {weights_s:.1f} s",
    }
    if setup.device.type == "cpu" and loaded() is not None:
        facts["Device"] += ", with kernels in C that were compiled at this start"
    if (computed_by := describe_class(setup.model_config)) is not None:
        facts["Computed by"] = computed_by
    name, is_foreign = setup.model_config.architecture, setup.model_config.is_foreign
    if (whole := whole_of_text_part(name, is_foreign=is_foreign)) is not None:
        facts["Serves"] = f"text alone; vision and audio of {whole} are not read"
    if quantization is not None:
        facts["Quantization"] = quantization
    if size > 1 and setup.device.type == "cuda":
        facts["Sums"] = (
            "by NCCL" if setup.tp.one_shot_all_reduce is None else "small ones in one kernel with the norm, else NCCL"
        )
    if setup.tp.is_expert_parallel and setup.model_config.experts is not None:
        facts["Experts"] = _describe_experts(setup.model_config.experts.num_experts, size)
    if setup.adapters is not None:
        facts["Adapters"] = setup.adapters.describe()
    facts["KV cache"] = _describe_pool(plan, each) + _describe_numbers(setup.kv_dtype, model) + describe_tiers(config)
    choice = _describe_choice(config, backends)
    facts["Attention"] = f"{setup.backend.name} ({choice}), blocks of {plan.block_size} tokens"
    if config.speculative is not None:
        facts["Speculation"] = f"{config.speculative.method}, up to {config.speculative.num_tokens} tokens ahead"
    if setup.device.type == "cuda" and not HAS_TRITON:
        facts["Attention"] += "; all kernels in torch, since triton cannot be imported"
    return facts


def describe_decode(model: Model, runner: ModelRunner) -> dict[str, str]:
    """Return the panel's row of decode steps that have all layers at once, if there are any. runner: of this model."""
    described = model.describe_decode(runner.kv_layers) if isinstance(model, CausalLM) else None
    return {} if described is None else {"Decode": described}


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def _describe_choice(config: EngineConfig, backends: Sequence[type[AttentionBackend]]) -> str:
    if config.attention_backend != "auto":
        return "asked for"
    names = ", ".join(cls.name for cls in backends)
    return f"of {names}, by speed on an H100, the first that takes this model here"


def _describe_model(model: ModelConfig) -> str:
    text = f"{model.architecture}, {model.num_parameters / 1e6:,.1f} M parameters"
    return text if model.experts is None else f"{text}, {model.num_active_parameters / 1e6:,.1f} M for each token"


def _describe_experts(num_experts: int, size: int) -> str:
    fewest, most = num_experts // size, -(-num_experts // size)
    numbers = str(fewest) if fewest == most else f"{fewest} or {most}"
    return f"{numbers} whole ones of {num_experts} on each of {size}"


def _describe_pool(plan: KVCachePlan, each: str) -> str:
    size, num_requests = format_size(plan.num_bytes), plan.num_requests(plan.max_model_len)
    text = f"{plan.num_tokens:,} tokens = {num_requests} requests × {plan.max_model_len:,} ({size}{each})"
    return f"{text}, {format_size(plan.state_bytes)} of state per request" if plan.state_bytes else text


def _describe_numbers(kv_dtype: torch.dtype, model: Model) -> str:
    """Describe the numbers of a pool that has another dtype than the model; nothing is said of the model's own."""
    if kv_dtype == INT8:
        return ", int8 with a scale for each token and head"
    return f", {_describe_fp8(model)}" if kv_dtype == FP8 else ""


def _describe_fp8(model: Model) -> str:
    """Describe the scales of an fp8 pool; warn if the model is known to lose accuracy with fp8."""
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    largest = max((float(layer.key_bias.abs().max()) for layer in layers if layer.key_bias is not None), default=0.0)
    if largest > _MAX_KEY_BIAS:
        logger.warning(
            "answers may be wrong, since the fp8 KV cache rounds this model's large keys coarsely:"
            " use --kv-cache-dtype int8, or auto largest_key_bias=%.0f",
            largest,
        )
    scales = [scale for layer in layers for scale in (layer.kv_scales.k, layer.kv_scales.v)]
    if any(isinstance(scale, torch.Tensor) for scale in scales):
        return "fp8 with the checkpoint's scales of each head"
    return "fp8 with the checkpoint's scales" if any(scale != 1.0 for scale in scales) else "fp8"
