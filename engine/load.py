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

from engine.config import EngineConfig
from engine.control import Stage
from engine.device import describe_device, resolve_device, resolve_dtype
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
from kernels.ops import HAS_TRITON
from models.config import ModelConfig
from models.errors import ModelError
from models.parallel import TensorParallel
from models.registry import build
from models.weights import Weights

logger = logging.getLogger(__name__)

# Fastest first, as measured on an H100 (benchmarks/notes.md)
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, TorchAttention)
# Below this, waking a second thread costs more than it computes (docs/performance.md)
_ONE_THREAD_PARAMETERS = 20_000_000
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
    model_config = ModelConfig.from_folder(Path(config.model))
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model_config, device)
    detail = f"{model_config.architecture}, {model_config.num_layers} layers, {_name(dtype)} on {device.type}"
    if device.type == "cpu" and model_config.num_parameters < _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    backend = _select_backend(config, model_config, dtype, device)
    loader = CompilerLoader(Path(config.model))
    setup = Setup(config, model_config, device, dtype, choose_limits(config, device), backend, loader)
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
    model, num_bytes = _load_weights(config, setup.model_config, device, dtype, on_stage, detail)
    facts = {
        "Model": f"{model_config.architecture}, {model_config.num_parameters / 1e6:,.1f} M parameters",
        "Device": describe_device(device),
        "Weights": f"{format_size(num_bytes)} {_name(dtype)} in {time.monotonic() - started:.1f} s",
    }
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
    facts["KV cache"] = _describe_pool(plan)
    facts["Attention"] = f"{backend.name} ({_describe_choice(config)}), blocks of {plan.block_size} tokens"
    if config.speculative is not None:
        facts["Speculation"] = f"{config.speculative.method}, up to {config.speculative.num_tokens} tokens ahead"
    if device.type == "cuda" and not HAS_TRITON:
        facts["Attention"] += "; all kernels in torch, since triton cannot be imported"

    def on_graph(done: int, total: int) -> None:
        on_stage(Stage("graphs", done, total, unit="graphs", detail=detail))

    return setup.assemble(model, plan, on_graph, facts)


def _serve_small(setup: Setup, plan: KVCachePlan, serve: Serve | None) -> None:
    """Serve a model of one random layer of each kind, with its true pool per layer."""
    model_config = setup.model_config.one_layer_of_each_kind()
    small = dataclasses.replace(setup, model_config=model_config, backend=type(setup.backend)())
    with torch.inference_mode():
        model = build(model_config, Weights.dummy(device=setup.device, dtype=setup.dtype), TensorParallel())
    loaded = small.assemble(model, plan, lambda done, total: None, {})
    if serve is not None:
        serve(loaded)


def _load_weights(
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    on_stage: OnStage,
    detail: str,
) -> tuple[torch.nn.Module, int]:
    """Return the model and the bytes of its weights."""

    def progress(done: int, total: int) -> None:
        on_stage(Stage("weights", done, total, unit="bytes", detail=detail))

    on_stage(Stage("weights", detail=detail))
    if config.load_format == "dummy":
        weights = Weights.dummy(device=device, dtype=dtype)
    else:
        weights = Weights.from_folder(Path(config.model), device=device, dtype=dtype, progress=progress)
    with torch.inference_mode():
        model = build(model_config, weights, TensorParallel())
    return model, model_config.num_parameters * dtype.itemsize


def _select_backend(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    spec = model.attention_spec(1, dtype, device, config.block_size)
    try:
        return select_backend(spec, BACKENDS, wanted=config.attention_backend)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _describe_choice(config: EngineConfig) -> str:
    if config.attention_backend != "auto":
        return "asked for"
    names = ", ".join(cls.name for cls in BACKENDS)
    return f"of {names}, by speed on an H100, the first that takes this model here"


def _describe_pool(plan: KVCachePlan) -> str:
    size = format_size(plan.bytes_per_block * plan.num_blocks)
    requests = plan.num_tokens // plan.max_model_len
    return f"{plan.num_tokens:,} tokens = {requests} requests × {plan.max_model_len:,} ({size})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
