"""From an EngineConfig to a ModelRunner: device, dtype, weights, KV pool, attention backend. Imports torch.

Every default that depends on the machine is decided here, once, and reported as facts for the start-up panel. What
cannot work is refused before the weights are read; kernels are compiled while they are (engine/startup/precompile.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import distributed

from engine.device.cuda_graph import max_step_tokens
from engine.device.kv_cache import KVCachePlan
from engine.device.memory import describe_shortage, format_size, is_out_of_memory
from engine.device.model_runner import ModelRunner
from engine.grammar.compiler import CompilerLoader
from engine.interface.config import EngineConfig
from engine.interface.control import Stage
from engine.interface.errors import StartupError
from engine.startup.adapters import open_adapters
from engine.startup.device_choice import resolve_device, resolve_dtype, resolve_kv_dtype
from engine.startup.limits import choose_limits
from engine.startup.precompile import rehearse
from engine.startup.setup import LoadedEngine, Setup
from engine.startup.setup_facts import describe_setup
from engine.tensor_parallel.process_group import least, leave_ranks
from engine.tensor_parallel.ranks import RankConfig, RankHost, Ranks
from engine.tensor_parallel.small_sums import rehearsed_small_sums
from kernels.attention.base import AttentionBackend, select_backend
from kernels.attention.flash import FlashAttention
from kernels.attention.torch_ref import TorchAttention
from kernels.attention.triton_backend import TritonAttention
from kernels.ops import HAS_TRITON
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.parallel import TensorParallel
from models.registry import Model, build
from models.weights.weights import Weights

logger = logging.getLogger(__name__)

# Fastest first, as measured on an H100 (benchmarks/notes.md)
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, TorchAttention)
# Below this, waking a second thread costs more than it computes (docs/performance.md)
_ONE_THREAD_PARAMETERS = 20_000_000
OnStage = Callable[[Stage], None]


Serve = Callable[[LoadedEngine], None]


def load_engine(
    config: EngineConfig, on_stage: OnStage, *, serve: Serve | None = None, host: RankHost | None = None
) -> LoadedEngine:
    """Load everything, reporting stages. Raises StartupError with one sentence for whatever is wrong.

    serve: sends requests of every kind through a loaded engine, so that their kernels are compiled ahead, too.
    host: of the other ranks, if the model is split over several.
    """
    stages = [Stage("config")]

    def note(stage: Stage) -> None:
        stages.append(stage)
        on_stage(stage)

    with _in_sentences(config, stages):
        return _load(config, note, serve, host or RankHost())


def load_rank(told: RankConfig) -> ModelRunner:
    """Load the share of a rank after the first, beside load_engine in the first's process. Raises StartupError."""
    config, stages = told.engine, [Stage("config")]
    with _in_sentences(config, stages):
        setup = _decide(config, rank=told.rank).limited_to(told.max_model_len).joined(told.rendezvous, told.rank)
        started = time.monotonic()
        model = _load_weights(setup, stages.append, "")
        logger.info("weights loaded after_s=%.1f", time.monotonic() - started)  # else nobody knows which rank hangs
        least(setup.tp, 0, setup.device)  # until the first has compiled all kernels
        stages.append(Stage("kv_cache"))
        return setup.assemble(model, setup.plan_pool(has_weights=True), lambda done, total: None, {}).runner


@contextlib.contextmanager
def _in_sentences(config: EngineConfig, stages: list[Stage]) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise StartupError(str(error)) from error
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(describe_shortage(config, during=stages[-1].name)) from error


def _load(config: EngineConfig, on_stage: OnStage, serve: Serve | None, host: RankHost) -> LoadedEngine:
    on_stage(Stage("config"))
    setup = _decide(config, rank=0)
    plan, key = setup.plan_pool(has_weights=False), repr(setup)
    # The model is built for the requests that fit: its rotary tables end there, and longrope is chosen by it
    whole, setup = setup.model_config, setup.limited_to(plan.max_model_len)
    with _start_ranks(config, host, max_model_len=plan.max_model_len) as ranks:
        return _load_beside(ranks, setup, whole, plan, key, on_stage, serve)


@contextlib.contextmanager
def _start_ranks(config: EngineConfig, host: RankHost, *, max_model_len: int) -> Iterator[Ranks | None]:
    """Start the other ranks, if there are any. If what follows fails they end, as if there had been none."""
    if config.tensor_parallel_size == 1:
        yield None
        return
    if distributed.is_initialized():
        raise StartupError(
            "This process is in a group of torch.distributed, as of a model that is split over devices:"
            " another such model needs its own process."
        )
    ranks = Ranks(config, host, max_model_len=max_model_len)
    try:
        yield ranks
    except BaseException as error:
        if isinstance(error, RuntimeError | OSError):  # as of a connection that broke
            ranks.await_blame()
        ranks.kill()
        leave_ranks()
        raise


def _load_beside(
    ranks: Ranks | None,
    setup: Setup,
    whole: ModelConfig,
    plan: KVCachePlan,
    key: str,
    on_stage: OnStage,
    serve: Serve | None,
) -> LoadedEngine:
    """Load this rank's share. whole: setup's model before it was limited; key: of all that decides on kernels."""
    config, device = setup.config, setup.device
    compilation = None
    if device.type == "cuda" and HAS_TRITON:
        on_stage(Stage("kernels"))
        # Without graphs, too, since a step that fits none is launched kernel by kernel, and its kernels may differ
        eager = dataclasses.replace(setup, config=msgspec.structs.replace(config, enforce_eager=True))
        performances = [lambda: _serve_small(setup, plan, None), lambda: _serve_small(eager, plan, serve)]
        compilation = rehearse(performances, key=key)
    setup.compiler_loader.start()  # beside the weights, and after the rehearsal, which forks
    dtype = str(setup.dtype).removeprefix("torch.")
    detail = f"{whole.architecture}, {whole.num_layers} layers, {dtype} on {device.type}"
    if ranks is not None:
        on_stage(Stage("ranks", detail=f"{config.tensor_parallel_size} processes"))
        setup = setup.joined(ranks.rendezvous, 0)
    started = time.monotonic()
    model = _load_weights(setup, on_stage, detail)
    weights_s = time.monotonic() - started
    if compilation is not None:
        compilation.wait(lambda done, total: on_stage(Stage("kernels", done, total, unit="kernels")))
    if ranks is not None:
        on_stage(Stage("ranks", detail="until each has its weights"))
    least(setup.tp, 0, device)  # now the other ranks find all kernels compiled
    on_stage(Stage("kv_cache"))
    plan = setup.plan_pool(has_weights=True)
    if config.max_model_len is None and plan.max_model_len < whole.max_context_len:
        logger.warning(
            "max_model_len=%d reduced from %d: that is what %s of KV cache holds",
            plan.max_model_len,
            whole.max_context_len,
            format_size(plan.bytes_per_block * plan.num_blocks),
        )
    facts = describe_setup(
        dataclasses.replace(setup, model_config=whole), plan, model, backends=BACKENDS, weights_s=weights_s
    )

    def on_graph(done: int, total: int) -> None:
        on_stage(Stage("graphs", done, total, unit="graphs", detail=detail))

    return setup.assemble(model, plan, on_graph, facts, ranks=ranks)


def _decide(config: EngineConfig, *, rank: int) -> Setup:
    """Choose what the configuration leaves open, and open the adapters. Raises StartupError or ModelError."""
    tp = TensorParallel(rank, config.tensor_parallel_size)
    model = ModelConfig.from_folder(Path(config.model)).quantized(config.quantization)
    model.check_tensor_parallel(tp.size)
    device = resolve_device(config.device, rank=rank, size=tp.size)
    dtype = resolve_dtype(config.dtype, model, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device)
    if device.type == "cpu" and model.num_parameters < _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
    elif device.type == "cpu" and tp.size > 1:
        torch.set_num_threads(max(torch.get_num_threads() // tp.size, 1))
    backend = _select_backend(config, model, dtype, device, kv_dtype=kv_dtype)
    limits = choose_limits(config, is_cuda=device.type == "cuda")
    most = max_step_tokens(limits.max_num_seqs, limits.max_num_batched_tokens)
    adapters = open_adapters(config, model, max_step_tokens=most, dtype=dtype, device=device, tp=tp)
    loader = CompilerLoader(Path(config.model))
    return Setup(config, model, device, dtype, kv_dtype, limits, backend, loader, adapters, tp)


def _serve_small(setup: Setup, plan: KVCachePlan, serve: Serve | None) -> None:
    """Serve one rank's share of a model of one random layer of each kind, with its true pool per layer."""
    model_config = setup.model_config.one_layer_of_each_kind()
    small = dataclasses.replace(setup, model_config=model_config, backend=type(setup.backend)())
    adapters = None if setup.adapters is None else setup.adapters.stack(is_partial=True)
    weights = Weights.dummy(device=setup.device, dtype=setup.dtype, adapters=adapters)
    sums = rehearsed_small_sums(setup.tp.size, setup.device, width=model_config.hidden_size)
    with torch.inference_mode():
        model = build(model_config, weights, dataclasses.replace(setup.tp, small_sums=sums))
    loaded = small.assemble(model, plan, lambda done, total: None, {})
    if serve is not None:
        serve(loaded)


def _load_weights(setup: Setup, on_stage: OnStage, detail: str) -> Model:
    """Return the model, or this rank's share of it, with its weights on the device."""

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
        model = build(setup.model_config, weights, setup.tp)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what quantising took for a moment is the pool's now
    return model


def _select_backend(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    spec = model.attention_spec(config.tensor_parallel_size, dtype, device, config.block_size, kv_dtype=kv_dtype)
    try:
        return select_backend(spec, BACKENDS, wanted=config.attention_backend)
    except ValueError as error:
        raise StartupError(str(error)) from error
