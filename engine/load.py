"""From an EngineConfig to a ModelRunner: device, dtype, weights, KV pool, attention backend. Imports torch.

Every default that depends on the machine is decided here, once, and reported as facts for the start-up panel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig, SchedulerConfig
from engine.control import Stage
from engine.errors import StartupError
from engine.kv_cache import GIB, KVCachePlan, allocate_kv_cache, format_size, free_bytes, plan_kv_cache
from engine.model_runner import ModelRunner
from kernels.attention.base import AttentionBackend, select_backend
from kernels.attention.flash import FlashAttention
from kernels.attention.torch_ref import TorchAttention
from kernels.attention.triton_backend import TritonAttention
from models.config import ModelConfig
from models.errors import ModelError
from models.parallel import TensorParallel
from models.registry import build
from models.weights import Weights

logger = logging.getLogger(__name__)

# Fastest first, as measured on an H100 (benchmarks/notes.md)
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, TorchAttention)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Below this, waking a second thread costs more than it computes (docs/performance.md)
_ONE_THREAD_PARAMETERS = 20_000_000
# How long decoding requests wait at most for a step with prompts: what a reader of a stream does not notice
_LONG_STEP_S = 0.045
# What the captured graphs themselves take on a GPU, about 10 MiB each
_GRAPHS_BYTES = GIB
OnStage = Callable[[Stage], None]


@dataclass(frozen=True)
class LoadedEngine:
    """What the loop needs, and what the panel shows."""

    runner: ModelRunner
    scheduler_config: SchedulerConfig
    depth: int
    vocab_size: int
    facts: dict[str, str]


def load_engine(config: EngineConfig, on_stage: OnStage) -> LoadedEngine:
    """Load everything, reporting stages. Raises StartupError with one sentence for whatever is wrong."""
    try:
        return _load(config, on_stage)
    except ModelError as error:
        raise StartupError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"out of memory on the device while loading {config.model}: choose a smaller model or dtype, or free memory"
        ) from error


def _load(config: EngineConfig, on_stage: OnStage) -> LoadedEngine:
    on_stage(Stage("config"))
    model_config = ModelConfig.from_folder(Path(config.model))
    device = _resolve_device(config.device)
    dtype = _resolve_dtype(config.dtype, model_config, device)
    limits = _limits(config, device)
    detail = f"{model_config.architecture}, {model_config.num_layers} layers, {_name(dtype)} on {device.type}"
    if device.type == "cpu" and model_config.num_parameters < _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    started = time.monotonic()
    model, num_bytes = _load_weights(config, model_config, device, dtype, on_stage, detail)
    facts = {
        "Model": f"{model_config.architecture}, {model_config.num_parameters / 1e6:,.1f} M parameters",
        "Device": _describe_device(device),
        "Weights": f"{format_size(num_bytes)} {_name(dtype)} in {time.monotonic() - started:.1f} s",
    }

    on_stage(Stage("kv_cache"))
    backend = _select_backend(config, model_config, dtype, device)
    plan = plan_kv_cache(
        config,
        model_config,
        dtype=dtype,
        block_size=config.block_size or max(16, backend.block_size_multiple),
        max_num_seqs=limits.max_num_seqs,
        free_bytes=free_bytes(config, device, reserve_bytes=_activation_bytes(model_config, limits, dtype)),
    )
    runner = ModelRunner(
        model,
        kv_caches=allocate_kv_cache(plan, model_config, dtype=dtype, device=device),
        plan=plan,
        backend=backend,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=model_config.vocab_size,
        device=device,
    )
    if device.type == "cuda" and backend.is_graph_safe and not config.enforce_eager:
        runner.capture_graphs(lambda done, total: on_stage(Stage("graphs", done, total, unit="graphs", detail=detail)))
    longest = _longest_step(runner, limits, config)
    scheduler_config = SchedulerConfig(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        min_num_mixed_tokens=min(runner.efficient_tokens or longest, longest),
        max_num_mixed_tokens=longest,
        step_sizes=runner.padded_tokens,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    facts["KV cache"] = _describe_pool(plan)
    facts["Attention"] = f"{backend.name} ({_describe_choice(config)}), blocks of {plan.block_size} tokens"
    depth = config.depth or (2 if device.type == "cuda" else 1)
    return LoadedEngine(runner, scheduler_config, depth, model_config.vocab_size, facts)


@dataclass(frozen=True)
class _Limits:
    """How much runs at once; see EngineConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int


def _limits(config: EngineConfig, device: torch.device) -> _Limits:
    """Fill in what the user left open. Raises StartupError for limits that starve each other."""
    is_cuda = device.type == "cuda"
    num_seqs = config.max_num_seqs or (256 if is_cuda else 64)
    batched = config.max_num_batched_tokens or max(8192 if is_cuda else 512, num_seqs)
    for flag, tokens in (
        ("--max-num-batched-tokens", batched),
        ("--max-num-mixed-tokens", config.max_num_mixed_tokens or batched),
    ):
        if tokens < num_seqs:
            raise StartupError(
                f"{flag} {tokens} is less than --max-num-seqs {num_seqs}: "
                "each running request needs one token per step."
            )
    return _Limits(num_seqs, batched)


def _longest_step(runner: ModelRunner, limits: _Limits, config: EngineConfig) -> int:
    """How many tokens a step may have while requests decode, as measured here, unless the user says."""
    if config.max_num_mixed_tokens:
        return config.max_num_mixed_tokens
    fitting = runner.fitting_tokens(_LONG_STEP_S) or limits.max_num_batched_tokens
    return min(max(fitting, 2 * limits.max_num_seqs), limits.max_num_batched_tokens)


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


def _resolve_device(name: str) -> torch.device:
    """Return the device asked for. auto: CUDA, else MPS, else the CPU. Raises StartupError if it is not there."""
    is_there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, there in is_there.items() if there))
    if not is_there[name]:
        raise StartupError(f"--device {name}: torch {torch.__version__} finds no {name} device here: use --device cpu")
    return torch.device(name)


def _resolve_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype asked for. auto: float32 on the CPU, where it is fastest; elsewhere a 16-bit one."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if model.dtype == "float16" else torch.bfloat16


def _select_backend(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    spec = model.attention_spec(1, dtype, device, config.block_size)
    try:
        return select_backend(spec, BACKENDS, wanted=config.attention_backend)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _activation_bytes(model: ModelConfig, limits: _Limits, dtype: torch.dtype) -> int:
    """Upper estimate of what a step holds beside weights and pool: the widest layer, logits, counts for penalties."""
    widest = 4 * model.hidden_size + 3 * model.intermediate_size + 3 * model.num_heads * model.head_dim
    logits = limits.max_num_seqs * model.vocab_size * (4 * 4 + 5)
    return 2 * limits.max_num_batched_tokens * widest * dtype.itemsize + logits + _GRAPHS_BYTES


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    if device.type == "mps":
        return "mps (Apple GPU; untested path)"
    num_threads = torch.get_num_threads()
    return f"cpu, {num_threads} thread{'s' * (num_threads != 1)}"


def _describe_choice(config: EngineConfig) -> str:
    if config.attention_backend != "auto":
        return "asked for"
    names = ", ".join(cls.name for cls in BACKENDS)
    return f"the fastest measured of those that take this model here: {names}"


def _describe_pool(plan: KVCachePlan) -> str:
    size = format_size(plan.bytes_per_block * plan.num_blocks)
    requests = plan.num_tokens // plan.max_model_len
    return f"{plan.num_tokens:,} tokens = {requests} requests × {plan.max_model_len:,} ({size})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
