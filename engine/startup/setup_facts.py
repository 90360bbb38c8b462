"""What the start-up panel says of a loaded model: label → text. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.device.kv_cache import KVCachePlan
from engine.device.memory import format_size
from engine.interface.config import EngineConfig
from engine.startup.device_choice import describe_device
from engine.startup.setup import Setup
from kernels.attention.base import AttentionBackend
from kernels.elementwise.reference import FP8, UNSCALED
from kernels.ops import HAS_TRITON
from models.config.model_config import ModelConfig
from models.layers.attention import SelfAttention
from models.registry import Model

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
    """Return the rows, top to bottom. backends: those that were tried in turn. weights_s: what loading weights took."""
    config, quantization, size = setup.config, setup.model_config.quantization, setup.tp.size
    kind = _name(setup.dtype) if quantization is None else quantization.describe()
    each = "" if size == 1 else f" on each of {size}"
    facts = {
        "Model": _describe_model(setup.model_config),
        "Device": describe_device(setup.device) if size == 1 else f"{size} × {describe_device(setup.device)}",
        "Weights": f"{format_size(setup.weight_bytes)}{each} {kind} in {weights_s:.1f} s",
    }
    if quantization is not None:
        facts["Quantization"] = quantization.describe()
    if size > 1 and setup.device.type == "cuda":
        facts["Sums"] = (
            "by NCCL" if setup.tp.small_sums is None else "small ones in one kernel with the norm, else NCCL"
        )
    if setup.adapters is not None:
        facts["Adapters"] = setup.adapters.describe()
    facts["KV cache"] = _describe_pool(plan, each) + (f", {_describe_fp8(model)}" if setup.kv_dtype == FP8 else "")
    choice = _describe_choice(config, backends)
    facts["Attention"] = f"{setup.backend.name} ({choice}), blocks of {plan.block_size} tokens"
    if config.speculative is not None:
        facts["Speculation"] = f"{config.speculative.method}, up to {config.speculative.num_tokens} tokens ahead"
    if setup.device.type == "cuda" and not HAS_TRITON:
        facts["Attention"] += "; all kernels in torch, since triton cannot be imported"
    return facts


def _describe_choice(config: EngineConfig, backends: Sequence[type[AttentionBackend]]) -> str:
    if config.attention_backend != "auto":
        return "asked for"
    names = ", ".join(cls.name for cls in backends)
    return f"of {names}, by speed on an H100, the first that takes this model here"


def _describe_model(model: ModelConfig) -> str:
    text = f"{model.architecture}, {model.num_parameters / 1e6:,.1f} M parameters"
    return text if model.experts is None else f"{text}, {model.num_active_parameters / 1e6:,.1f} M for each token"


def _describe_pool(plan: KVCachePlan, each: str) -> str:
    size = format_size(plan.bytes_per_block * plan.num_blocks)
    requests = plan.num_tokens // plan.max_model_len
    return f"{plan.num_tokens:,} tokens = {requests} requests × {plan.max_model_len:,} ({size}{each})"


def _describe_fp8(model: Model) -> str:
    """Say whose scales an fp8 pool has; warn of a model that it is known to spoil."""
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    largest = max((float(layer.key_bias.abs().max()) for layer in layers if layer.key_bias is not None), default=0.0)
    if largest > _MAX_KEY_BIAS:
        logger.warning(
            "kv_cache_dtype=fp8: this model adds up to %.0f to its keys, which fp8 then rounds so coarsely that answers"
            " may be wrong: use --kv-cache-dtype auto",
            largest,
        )
    return "fp8 with the checkpoint's scales" if any(layer.kv_scales != UNSCALED for layer in layers) else "fp8"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
