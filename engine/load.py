"""From an EngineConfig to a ModelRunner: device, dtype, weights, KV pool, attention backend. Imports torch.

Every default that depends on the machine is decided here, once, and reported as facts for the start-up panel. What
cannot work is refused before the weights are read; kernels are compiled while they are (engine/rehearsal.py).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from engine.adapters import open_adapters
from engine.config import EngineConfig
from engine.control import Stage
from engine.cuda_graph import max_step_tokens
from engine.device import describe_device, resolve_device, resolve_dtype, resolve_kv_dtype
from engine.errors import StartupError
from engine.grammar_compiler import CompilerLoader
from engine.kv_cache import KVCachePlan
from engine.memory import describe_shortage, format_size, is_out_of_memory
from engine.rehearsal import rehearse
from engine.setup import LoadedEngine, Setup, choose_limits
from kernels.attention.base import AttentionBackend, select_backend
from kernels.attention.flash import FlashAttention
from kernels.attention.torch_ref import TorchAttention
from kernels.attention.triton_backend import TritonAttention
from kernels.kv_write import FP8, UNSCALED
from kernels.ops import HAS_TRITON
from models.config import ModelConfig
from models.errors import ModelError
from models.layers.attention import SelfAttention
from models.parallel import TensorParallel
from models.registry import build
from models.weights import Weights

logger = logging.getLogger(__name__)

# Fastest first, as measured on an H100 (benchmarks/notes.md)
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, TorchAttention)
# Below this, waking a second thread costs more than it computes (docs/performance.md)
_ONE_THREAD_PARAMETERS = 20_000_000
# Qwen2 has keys of hundreds, and fails with fp8 (github.com/QwenLM/Qwen3/issues/840); from 64 on, fp8's steps are 8
_MAX_KEY_BIAS = 64.0
OnStage = Callable[[Stage], None]


Serve = Callable[[LoadedEngine], None]


def load_engine(config: EngineConfig, on_stage: OnStage, *, serve: Serve | None = None) -> LoadedEngine:
    """Load everything, reporting stages. Raises StartupError with one sentence for whatever is wrong.

    serve: sends requests of every kind through a loaded engine, so that their kernels are compiled ahead, too.
    """
    stages = [Stage("config")]

    def note(stage: Stage) -> None:
        stages.append(stage)
        on_stage(stage)

    try:
        return _load(config, note, serve)
    except ModelError as error:
        raise StartupError(str(error)) from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(describe_shortage(config, during=stages[-1].name)) from error


def _load(config: EngineConfig, on_stage: OnStage, serve: Serve | None) -> LoadedEngine:
    on_stage(Stage("config"))
    model_config = ModelConfig.from_folder(Path(config.model)).quantized(config.quantization)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model_config, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device)
    detail = f"{model_config.architecture}, {model_config.num_layers} layers, {_name(dtype)} on {device.type}"
    if device.type == "cpu" and model_config.num_parameters < _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    setup = _decide(config, model_config, dtype, kv_dtype, device)
    loader, adapters, backend = setup.compiler_loader, setup.adapters, setup.backend
    plan, key = setup.plan_pool(has_weights=False), repr(setup)
    # The model is built for the requests that fit: its rotary tables end there, and longrope is chosen by it
    setup = dataclasses.replace(setup, model_config=model_config.limited_to(plan.max_model_len))
    compilation = None
    if device.type == "cuda" and HAS_TRITON:
        on_stage(Stage("kernels"))
        # Without graphs, too, since a step that fits none is launched kernel by kernel, and its kernels may differ
        eager = dataclasses.replace(setup, config=msgspec.structs.replace(config, enforce_eager=True))
        performances = [lambda: _serve_small(setup, plan, None), lambda: _serve_small(eager, plan, serve)]
        compilation = rehearse(performances, key=key)
    loader.start()  # beside the weights, and after the rehearsal, which forks
    started = time.monotonic()
    model, num_bytes = _load_weights(setup, on_stage, detail)
    quantization = model_config.quantization
    kind = _name(dtype) if quantization is None else quantization.describe()
    facts = {
        "Model": _describe_model(model_config),
        "Device": describe_device(device),
        "Weights": f"{format_size(num_bytes)} {kind} in {time.monotonic() - started:.1f} s",
    }
    if quantization is not None:
        facts["Quantization"] = quantization.describe()
    if adapters is not None:
        facts["Adapters"] = adapters.describe()
    if compilation is not None:
        compilation.wait(lambda done, total: on_stage(Stage("kernels", done, total, unit="kernels")))
    on_stage(Stage("kv_cache"))
    plan = setup.plan_pool(has_weights=True)
    if config.max_model_len is None and plan.max_model_len < model_config.max_context_len:
        logger.warning(
            "max_model_len=%d reduced from %d: that is what %s of KV cache holds",
            plan.max_model_len,
            model_config.max_context_len,
            format_size(plan.bytes_per_block * plan.num_blocks),
        )
    facts["KV cache"] = _describe_pool(plan) + (f", {_describe_fp8(model)}" if kv_dtype == FP8 else "")
    facts["Attention"] = f"{backend.name} ({_describe_choice(config)}), blocks of {plan.block_size} tokens"
    if config.speculative is not None:
        facts["Speculation"] = f"{config.speculative.method}, up to {config.speculative.num_tokens} tokens ahead"
    if device.type == "cuda" and not HAS_TRITON:
        facts["Attention"] += "; all kernels in torch, since triton cannot be imported"

    def on_graph(done: int, total: int) -> None:
        on_stage(Stage("graphs", done, total, unit="graphs", detail=detail))

    return setup.assemble(model, plan, on_graph, facts)


def _decide(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> Setup:
    """Choose what the configuration leaves open, and open the adapters. Raises StartupError or ModelError."""
    backend = _select_backend(config, model, dtype, device, kv_dtype=kv_dtype)
    limits = choose_limits(config, device)
    most = max_step_tokens(limits.max_num_seqs, limits.max_num_batched_tokens)
    adapters = open_adapters(config, model, max_step_tokens=most, dtype=dtype, device=device)
    loader = CompilerLoader(Path(config.model))
    return Setup(config, model, device, dtype, kv_dtype, limits, backend, loader, adapters)


def _serve_small(setup: Setup, plan: KVCachePlan, serve: Serve | None) -> None:
    """Serve a model of one random layer of each kind, with its true pool per layer."""
    model_config = setup.model_config.one_layer_of_each_kind()
    small = dataclasses.replace(setup, model_config=model_config, backend=type(setup.backend)())
    adapters = None if setup.adapters is None else setup.adapters.stack(is_partial=True)
    weights = Weights.dummy(device=setup.device, dtype=setup.dtype, adapters=adapters)
    with torch.inference_mode():
        model = build(model_config, weights, TensorParallel())
    loaded = small.assemble(model, plan, lambda done, total: None, {})
    if serve is not None:
        serve(loaded)


def _load_weights(setup: Setup, on_stage: OnStage, detail: str) -> tuple[torch.nn.Module, int]:
    """Return the model and the bytes of its weights."""

    def progress(done: int, total: int) -> None:
        on_stage(Stage("weights", done, total, unit="bytes", detail=detail))

    on_stage(Stage("weights", detail=detail))
    config, device, dtype = setup.config, setup.device, setup.dtype
    adapters = None if setup.adapters is None else setup.adapters.stack()
    if config.load_format == "dummy":
        weights = Weights.dummy(device=device, dtype=dtype, adapters=adapters)
    else:
        folder = Path(config.model)
        weights = Weights.from_folder(folder, device=device, dtype=dtype, progress=progress, adapters=adapters)
    with torch.inference_mode():
        model = build(setup.model_config, weights, TensorParallel())
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what quantising took for a moment is the pool's now
    return model, setup.model_config.weight_bytes(dtype)


def _select_backend(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    spec = model.attention_spec(1, dtype, device, config.block_size, kv_dtype=kv_dtype)
    try:
        return select_backend(spec, BACKENDS, wanted=config.attention_backend)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _describe_choice(config: EngineConfig) -> str:
    if config.attention_backend != "auto":
        return "asked for"
    names = ", ".join(cls.name for cls in BACKENDS)
    return f"of {names}, by speed on an H100, the first that takes this model here"


def _describe_model(model: ModelConfig) -> str:
    text = f"{model.architecture}, {model.num_parameters / 1e6:,.1f} M parameters"
    return text if model.experts is None else f"{text}, {model.num_active_parameters / 1e6:,.1f} M for each token"


def _describe_pool(plan: KVCachePlan) -> str:
    size = format_size(plan.bytes_per_block * plan.num_blocks)
    requests = plan.num_tokens // plan.max_model_len
    return f"{plan.num_tokens:,} tokens = {requests} requests × {plan.max_model_len:,} ({size})"


def _describe_fp8(model: torch.nn.Module) -> str:
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
