"""load_engine() and load_rank(): load a model by an EngineConfig. Imports torch.

They choose device, dtype, KV pool and attention backend, and load the weights. Every default that depends on the
machine is decided here, once. Unsupported combinations are refused before the weights are read; kernels are compiled
while the weights are read (engine/startup/precompile.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
from engine.startup.device_choice import (
    SMALL_PARAMETERS,
    gpu_bytes,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
)
from engine.startup.host_memory import check_host_memory, choose_host_memory, num_host_slots
from engine.startup.kv_disk import DiskFacts, KvDisk, check_kv_disk, digest_weights, stamp_files
from engine.startup.kv_peers import KvPeers, check_peers, with_host_memory
from engine.startup.limits import choose_limits
from engine.startup.loaded_engine import LoadedEngine
from engine.startup.panel import describe_decode, describe_setup, name_of
from engine.startup.precompile import Precompilation, keep_times, keys_of, known_times, precompile
from engine.startup.rehearsal import Serve, rehearse_beside, serve_small
from engine.startup.setup import Captured, Setup
from engine.tensor_parallel.process_group import least, leave_ranks
from engine.tensor_parallel.ranks import RankConfig, RankHost, Ranks
from kernels.attention.base import AttentionBackend, select_backend
from kernels.attention.flash import FlashAttention
from kernels.attention.torch_ref import TorchAttention
from kernels.attention.triton_backend import TritonAttention
from kernels.dispatch import HAS_TRITON
from kernels.native.library import compiled_beside
from models.build import Model, build, check_headers
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.foreign.choose import read_config
from models.parallel import TensorParallel
from models.weights.weights import Weights

logger = logging.getLogger(__name__)

# Fastest first, as measured on an H100 (benchmarks/notes.md)
BACKENDS: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, TorchAttention)
OnStage = Callable[[Stage], None]


@dataclasses.dataclass(frozen=True)
class _Order:
    """The parameters of load_engine() that do not concern the model."""

    on_stage: OnStage
    serve: Serve | None
    graphs: Captured
    pins_later: bool  # see Setup.assemble()


@dataclasses.dataclass(frozen=True)
class _Checked:
    """The facts that are known, and found possible, before a weight is read."""

    setup: Setup
    whole: ModelConfig  # setup's model before the context limit
    plan: KVCachePlan
    keys: Sequence[str]  # see keys_of()
    stamps: dict[str, tuple[int, ...]]  # stamp_files(), from before anything was read


def load_engine(
    config: EngineConfig,
    on_stage: OnStage,
    *,
    serve: Serve | None = None,
    host: RankHost | None = None,
    leaves_rest: bool = False,
    takes_over: bool = False,
    compiler_loader: CompilerLoader | None = None,
) -> LoadedEngine:
    """Load the model and start the other ranks, reporting stages. Blocks. Raises StartupError.

    leaves_rest: some graphs are left to LoadedEngine.engine(captures_graphs=True), unless the model is split, and most
    of host memory to LoadedEngine.pin_host_memory(), unless a disk or another engine is behind it.
    takes_over: requests wait, so that nearly all graphs are, if the times of steps are known from an engine before.
    serve: sends requests of every kind through a loaded engine, so that their kernels are precompiled, too.
    host: settings of the other ranks of a split model.
    compiler_loader: of the model's folder, if there is one already.
    """
    stages = [Stage("config")]

    def note(stage: Stage) -> None:
        stages.append(stage)
        on_stage(stage)

    with _in_sentences(config, stages):
        graphs = Captured.FEW if takes_over else Captured.SOME if leaves_rest else Captured.ALL
        order = _Order(note, serve, graphs, pins_later=leaves_rest)
        checked = _check(config, note, compiler_loader, takes_over=takes_over)
        with _start_ranks(checked, host or RankHost(), pins_later=leaves_rest) as ranks:
            return _load(checked, order, ranks)


def rehearse(config: EngineConfig, serve: Serve) -> bool:
    """Rehearse a start beside an engine that serves; see rehearse_beside(). Raises StartupError."""
    with _in_sentences(config, [Stage("config")]):
        return rehearse_beside(_decide(config, rank=0), serve)


def load_rank(told: RankConfig) -> ModelRunner:
    """Load the share of a rank after the first, while load_engine() runs in the first. Raises StartupError."""
    config, stages = told.engine, [Stage("config")]
    with _in_sentences(config, stages):
        setup = (
            _decide(config, rank=told.rank)
            .with_max_model_len(told.max_model_len)
            .after_join(told.rendezvous, told.rank)
        )
        started = time.monotonic()
        model = _load_weights(setup, stages.append, "")
        logger.info("weights loaded after_s=%.1f", time.monotonic() - started)  # shows which rank hangs
        least(setup.tp, 0, setup.device)  # wait until the first rank has compiled all kernels
        stages.append(Stage("kv_cache"))
        plan = setup.plan_pool(has_weights=True)
        slots = num_host_slots(config, plan)
        return setup.assemble(
            model, plan, lambda done, total: None, {}, num_host_slots=slots, pins_later=told.pins_later
        ).runner


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


def _check(config: EngineConfig, on_stage: OnStage, loader: CompilerLoader | None, *, takes_over: bool) -> _Checked:
    """Decide what is open, and refuse what cannot be served. Raises StartupError, ModelError."""
    on_stage(Stage("config"))
    stamps = stamp_files(config)
    check_peers(config)
    config = with_host_memory(config)
    setup = _decide(config, rank=0, loader=loader)
    if config.load_format != "dummy" and not setup.model_config.is_foreign:
        check_headers(setup.model_config, Path(config.model), setup.tp, dtype=setup.dtype)
    plan = setup.plan_pool(has_weights=False)
    taken = config.tensor_parallel_size * (setup.weight_bytes + plan.num_bytes) if setup.device.type == "cpu" else 0
    check_host_memory(config, plan, taken_bytes=taken)
    takes_over = takes_over and config.tensor_parallel_size == 1
    keys = keys_of(setup, max_num_seqs=plan.max_num_seqs, takes_over=takes_over)  # before what differs in each start
    config = choose_host_memory(config, plan, device_type=setup.device.type)
    check_kv_disk(config, block_bytes=plan.bytes_per_block)
    setup = dataclasses.replace(setup, config=config)
    # The model is built for the context that fits: it sets the length of rotary tables and the variant of longrope
    whole, setup = setup.model_config, setup.with_max_model_len(plan.max_model_len)
    return _Checked(setup, whole, plan, keys, stamps)


@contextlib.contextmanager
def _start_ranks(checked: _Checked, host: RankHost, *, pins_later: bool) -> Iterator[Ranks | None]:
    """Start the other ranks, if any; kill them if the body of the `with` statement fails."""
    config = checked.setup.config
    if config.tensor_parallel_size == 1:
        yield None
        return
    if distributed.is_initialized():
        raise StartupError(
            "This process is in a group of torch.distributed, as of a model that is split over devices:"
            " another such model needs its own process."
        )
    ranks = Ranks(config, host, max_model_len=checked.plan.max_model_len, pins_later=pins_later)
    try:
        yield ranks
    except BaseException as error:
        if isinstance(error, RuntimeError | OSError):  # possibly a broken connection to a rank
            ranks.await_blame()
        ranks.kill()
        leave_ranks()
        raise


def _load(checked: _Checked, order: _Order, ranks: Ranks | None) -> LoadedEngine:
    """Load the first rank's share beside the others."""
    setup, whole, on_stage = checked.setup, checked.whole, order.on_stage
    config, device = setup.config, setup.device
    compilation = _begin_compilation(checked, order)
    setup.compiler_loader.start()  # concurrently with the weights, but after precompile(), which forks
    detail = f"{whole.architecture}, {whole.num_layers} layers, {name_of(setup.dtype)} on {device.type}"
    if ranks is not None:
        on_stage(Stage("ranks", detail=f"{config.tensor_parallel_size} processes"))
        setup = setup.after_join(ranks.rendezvous, 0)
    digest = digest_weights(config)
    started = time.monotonic()
    model = _load_weights(setup, on_stage, detail)
    weights_s = time.monotonic() - started
    if compilation is not None:
        compilation.wait(lambda done, total: on_stage(Stage("kernels", done, total, unit="kernels")))
    if ranks is not None:
        on_stage(Stage("ranks", detail="until each has its weights"))
    least(setup.tp, 0, device)  # from here on the other ranks find all kernels compiled
    on_stage(Stage("kv_cache"))
    plan = setup.plan_pool(has_weights=True)
    _warn_of_limits(setup, whole, plan)
    facts = describe_setup(
        dataclasses.replace(setup, model_config=whole), plan, model, backends=BACKENDS, weights_s=weights_s
    )

    def on_graph(done: int, total: int) -> None:
        on_stage(Stage("graphs", done, total, unit="graphs", detail=detail))

    graphs = order.graphs if ranks is None else Captured.ALL
    known = None
    if graphs is not Captured.ALL and device.type == "cuda":
        known = known_times(checked.keys, is_settled=graphs is Captured.SOME)
    loaded = setup.assemble(
        model, plan, on_graph, facts, graphs=graphs, known=known, ranks=ranks,
        num_host_slots=num_host_slots(config, plan), pins_later=order.pins_later,
    )  # fmt: skip
    facts |= describe_decode(model, loaded.runner)  # of which `loaded` was given the dict
    if known is None and loaded.captures is not None:
        keep_times(checked.keys, loaded.captures.mixed.times)
    host_pages = loaded.runner.host_pages
    if host_pages is None:
        return loaded
    model_facts = _disk_facts(setup)
    disk = peers = None
    if digest is not None:
        disk = KvDisk(config, model_facts, plan, host_pages, weights=digest, stamps=checked.stamps, ranks=ranks)
    if config.peer is not None:
        peers = KvPeers(config, config.peer, model_facts, plan, host_pages, ranks=ranks)
    return dataclasses.replace(loaded, disk=disk, peers=peers)


def _begin_compilation(checked: _Checked, order: _Order) -> Precompilation | None:
    """Begin to compile the kernels of all steps in other processes; None: there are none, or they are compiled."""
    setup, plan = checked.setup, checked.plan
    if setup.device.type != "cuda" or not HAS_TRITON or setup.model_config.is_foreign:
        return None
    order.on_stage(Stage("kernels"))
    # Also without graphs: a step that fits no graph is launched kernel by kernel, and its kernels may differ
    eager = dataclasses.replace(setup, config=msgspec.structs.replace(setup.config, enforce_eager=True))
    workloads: list[Callable[[], object]] = [
        lambda: serve_small(setup, plan, None),
        lambda: serve_small(eager, plan, order.serve),
    ]
    return precompile(workloads, keys=checked.keys, before_fork=setup.compiler_loader.settle)


def _warn_of_limits(setup: Setup, whole: ModelConfig, plan: KVCachePlan) -> None:
    """Log what the size of the pool and of its blocks takes from the user, who asked for nothing else."""
    config, state = setup.config, plan.pages.state
    if config.max_model_len is None and plan.max_model_len < whole.max_context_len:
        logger.warning(
            "context reduced to the size of the KV cache max_model_len=%d model_max_len=%d kv_cache=%r",
            plan.max_model_len,
            whole.max_context_len,
            format_size(plan.num_bytes),
        )
    if plan.max_num_seqs < setup.limits.max_num_seqs:
        logger.warning(
            "requests at once reduced to those whose states fit max_num_seqs=%d default=%d state=%r kv_cache=%r",
            plan.max_num_seqs,
            setup.limits.max_num_seqs,
            format_size(plan.state_bytes),
            format_size(plan.num_bytes),
        )
    if state is not None and config.enable_prefix_caching and state.save_tokens > 64:
        logger.warning(
            "prefix hits end at multiples of hit_tokens=%d only, where states are saved: a --block-size that divides 64"
            " has more of them block_size=%d",
            state.save_tokens,
            plan.block_size,
        )


def _disk_facts(setup: Setup) -> DiskFacts:
    model = setup.model_config
    return DiskFacts(
        model_impl="transformers" if model.is_foreign else "quire",
        quantization=model.describe_quantization() or "none",
        dtype=setup.dtype,
        kv_dtype=setup.kv_dtype,
        is_long=any(rope is not None and rope.is_long(model.max_context_len) for rope in model.ropes),
        device=setup.device,
        attention_backend=setup.backend.name,
    )


def _prepare_cpu(model: ModelConfig, tp: TensorParallel) -> None:
    """Choose the number of threads, and pages of 2 MiB for large tensors, if Linux gives them to who asks for them."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it when it makes the first one
    if model.num_parameters < SMALL_PARAMETERS:
        torch.set_num_threads(1)
    elif tp.size > 1:
        torch.set_num_threads(max(torch.get_num_threads() // tp.size, 1))


def _decide(config: EngineConfig, *, rank: int, loader: CompilerLoader | None = None) -> Setup:
    """Choose the settings that the configuration leaves open; open the adapters. Raises StartupError, ModelError."""
    tp = TensorParallel(rank, config.tensor_parallel_size, is_expert_parallel=config.is_expert_parallel)
    model = read_config(Path(config.model), config.model_impl).quantized(config.quantization)
    model.check_tensor_parallel(tp.size, is_expert_parallel=tp.is_expert_parallel)
    if model.is_foreign and config.loras:
        raise ModelError(f"{model.architecture}: LoRA adapters need Quire's own layers, which it has not")
    device = resolve_device(config.device, rank=rank, size=tp.size)
    dtype = resolve_dtype(config.dtype, model, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device, model=model)
    if device.type == "cpu":
        _prepare_cpu(model, tp)
    elif HAS_TRITON:
        from kernels.precompile import keep_binaries_alone, settle_cache_keys  # imports Triton

        settle_cache_keys()
        keep_binaries_alone()
    backend = _select_backend(config, model, dtype, device, kv_dtype=kv_dtype)
    limits = choose_limits(config, gpu_bytes=gpu_bytes(device, size=tp.size))
    most = max_step_tokens(limits.max_num_seqs, limits.max_num_batched_tokens)
    adapters = open_adapters(config, model, max_step_tokens=most, dtype=dtype, device=device, tp=tp)
    loader = loader or CompilerLoader(Path(config.model))
    return Setup(config, model, device, dtype, kv_dtype, limits, backend, loader, adapters, tp)


def _load_weights(setup: Setup, on_stage: OnStage, detail: str) -> Model:
    """Return the model, or this rank's share of it, with its weights on the device."""

    def progress(done: int, total: int) -> None:
        on_stage(Stage("weights", done, total, unit="bytes", detail=detail))

    on_stage(Stage("weights", detail=detail))
    is_compiled = setup.device.type == "cpu" and setup.dtype == torch.bfloat16
    with compiled_beside(is_wanted=is_compiled and setup.model_config.num_parameters >= SMALL_PARAMETERS):
        return _read_weights(setup, progress)


def _read_weights(setup: Setup, progress: Callable[[int, int], None]) -> Model:
    config, device, dtype = setup.config, setup.device, setup.dtype
    adapters = None if setup.adapters is None else setup.adapters.stack()
    is_dummy = config.load_format == "dummy"
    if setup.model_config.is_foreign:
        from models.foreign.load import load_foreign  # imports transformers' model classes

        return load_foreign(
            setup.model_config,
            Path(config.model),
            device=device,
            dtype=dtype,
            backend=setup.backend,
            is_dummy=is_dummy,
        )
    if is_dummy:
        weights = Weights.dummy(device=device, dtype=dtype, adapters=adapters)
    else:
        folder = Path(config.model)
        weights = Weights.from_folder(folder, device=device, dtype=dtype, progress=progress, adapters=adapters)
    with torch.inference_mode():
        model = build(setup.model_config, weights, setup.tp)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that quantising used is now free for the pool
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
