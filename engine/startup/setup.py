"""Setup: the decisions made before the weights are read, and the assembly of a LoadedEngine. Imports torch.

Life of a Setup: engine/startup/load.py makes it → plan_pool() → with_max_model_len() → after_join(), with several ranks
→ assemble(), with the loaded model → LoadedEngine.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from engine.core.host_copies import SlotSource
from engine.device.graph_captures import GraphCaptures
from engine.device.graph_device import CudaGraphDevice
from engine.device.host_pages import BUFFER_BYTES as HOST_BUFFER_BYTES
from engine.device.host_pages import HostPages
from engine.device.kv_cache import (
    KVCachePlan,
    allocate_kv_cache,
    plan_for_states,
    plan_kv_cache,
    smallest_pool_bytes,
)
from engine.device.memory import DeviceMemory, check_memory, measure_memory
from engine.device.model_runner import ModelRunner
from engine.device.page_plan import PagePlan, plan_pages
from engine.device.step_states import ring_bytes
from engine.device.step_times import StepTimes
from engine.grammar.compiler import CompilerLoader
from engine.interface.config import EngineConfig, SchedulerConfig, SharingRates
from engine.startup.adapters import Adapters
from engine.startup.device_choice import head_copy_bytes
from engine.startup.host_memory import host_tier_config
from engine.startup.limits import Limits, choose_limits, sharing_rates, step_bytes
from engine.startup.loaded_engine import LoadedEngine
from engine.tensor_parallel.process_group import join_ranks, least
from engine.tensor_parallel.ranks import Ranks
from engine.tensor_parallel.slot_shares import RankedSlots
from kernels.attention.base import AttentionBackend
from models.build import Model
from models.config.model_config import ModelConfig
from models.parallel import ALONE, TensorParallel

logger = logging.getLogger(__name__)

# Target for the longest step with decode rows and prompt chunks: a pause that readers of a stream do not notice
_LONG_STEP_S = 0.045
# A step on a CPU with at least 85 % of the best token rate; longer ones, whose attention grows, are no faster
_EFFICIENT_ON_CPU = 128


class Captured(enum.Enum):
    """The graphs that assemble() captures. NONE: it only launches their kernels, to record them."""

    ALL = enum.auto()
    SOME = enum.auto()  # sizes of each magnitude; the engine captures the rest when it is idle
    FEW = enum.auto()  # as SOME, for a takeover: step times that were measured once are believed
    NONE = enum.auto()


@dataclass(frozen=True)
class Setup:
    """The decisions made before the weights are read. Its repr identifies it."""

    config: EngineConfig
    model_config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the pool
    limits: Limits
    backend: AttentionBackend = field(repr=False)
    compiler_loader: CompilerLoader = field(repr=False)
    adapters: Adapters | None = None
    tp: TensorParallel = field(default=ALONE, repr=False)

    @property
    def rank_share(self) -> ModelConfig:
        """The model's dimensions on one rank."""
        return self.model_config.share_of_rank(self.tp.size, is_expert_parallel=self.tp.is_expert_parallel)

    @property
    def num_loras(self) -> int:
        """The number of loaded adapters."""
        return 0 if self.adapters is None else len(self.adapters.opened)

    @property
    def weight_bytes(self) -> int:
        """The size of the weights on each device."""
        share = self.rank_share
        return share.weight_bytes(self.dtype, self.device) + head_copy_bytes(share, self.dtype, self.device)

    @property
    def step_bytes(self) -> int:
        """An upper estimate of a step's memory beside weights and pool, and the rings of drafts of layers with states.

        On the CPU a step's own memory is negligible.
        """
        kept = 0
        if self.config.speculative is not None:
            num_requests, num_drafts = self.limits.max_num_seqs, self.config.speculative.num_tokens
            states = self.rank_share.states
            kept = ring_bytes(states, num_requests=num_requests, num_drafts=num_drafts, dtype=self.dtype)
        if self.device.type == "cpu":
            return kept
        if self.config.kv_host_memory_bytes is not None or self.config.chooses_host_memory:
            kept += HOST_BUFFER_BYTES
        return kept + step_bytes(
            self.rank_share,
            self.limits,
            self.dtype,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.config.max_model_len,
        )

    def limited_to(self, max_num_seqs: int) -> Setup:
        """Return this setup for at most max_num_seqs requests at once."""
        config = msgspec.structs.replace(
            self.config, max_num_seqs=max_num_seqs, max_num_batched_tokens=self.limits.max_num_batched_tokens
        )
        return dataclasses.replace(self, limits=choose_limits(config, gpu_bytes=None))

    def with_max_model_len(self, max_model_len: int) -> Setup:
        """Return this setup for requests of at most max_model_len tokens."""
        return dataclasses.replace(self, model_config=self.model_config.with_max_model_len(max_model_len))

    def after_join(self, rendezvous: str, rank: int) -> Setup:
        """Join the other ranks and return this setup with their process group; see join_ranks(). Blocks."""
        tp = join_ranks(
            rank=rank,
            size=self.tp.size,
            rendezvous=rendezvous,
            device=self.device,
            hidden_size=self.model_config.hidden_size if self.dtype.itemsize == 2 else None,
        )
        return dataclasses.replace(self, tp=dataclasses.replace(tp, is_expert_parallel=self.tp.is_expert_parallel))

    def measure_memory(self) -> DeviceMemory:
        """Return this rank's device memory now, with the smallest `usable` of all ranks."""
        memory, tp = measure_memory(self.config, self.device), self.tp
        if self.device.type == "cpu":  # shared by all ranks and engines
            num_engines = 1 if self.config.peer is None else self.config.peer.num_engines
            memory = dataclasses.replace(memory, usable=memory.usable // (tp.size * num_engines))
        return dataclasses.replace(memory, usable=least(tp, memory.usable, self.device))

    @property
    def sharing(self) -> SharingRates | None:
        """When decode rows are grouped by shared prefixes; None: never."""
        if not (self.config.enable_prefix_caching and self.config.groups_rows and self.device.type == "cuda"):
            return None
        if not (self.backend.groups_rows and self.backend.is_graph_safe):
            return None
        return sharing_rates(self.rank_share, self.kv_dtype)

    @property
    def block_size(self) -> int:
        """The tokens of a block of the attention kernels."""
        return self.config.block_size or max(16, self.backend.block_size_multiple)

    def plan_pages(self) -> PagePlan:
        """Plan the layout of the pool's pages."""
        share = self.rank_share
        return plan_pages(share.caches, states=share.states, block_size=self.block_size, dtype=self.kv_dtype)

    def plan_pool(self, *, has_weights: bool, memory: DeviceMemory | None = None) -> KVCachePlan:
        """Size the pool from `memory`, by default the device's memory now. Raises StartupError.

        has_weights: the weights are already on the device; otherwise their size is subtracted.
        """
        memory = memory or self.measure_memory()
        pages = self.plan_pages()
        if not has_weights:
            if self.adapters is not None:
                memory = dataclasses.replace(memory, usable=memory.usable - self.adapters.num_bytes)
            model, least = self.rank_share, smallest_pool_bytes(self.config, pages, longest=self.longest)
            check_memory(
                self.config,
                model,
                memory,
                dtype=self.dtype,
                device=self.device,
                step_bytes=self.step_bytes,
                pool_bytes=least,
            )
            memory = dataclasses.replace(memory, usable=memory.usable - self.weight_bytes)
        if pages.state is None:
            return self._plan_pool(pages, memory)
        return plan_for_states(
            self.config,
            lambda num_seqs: self.limited_to(num_seqs)._plan_pool(pages, memory),
            wanted=self.limits.max_num_seqs,
        )

    @property
    def longest(self) -> int:
        """The tokens that the model's positions reach."""
        return self.model_config.max_context_len

    def _plan_pool(self, pages: PagePlan, memory: DeviceMemory) -> KVCachePlan:
        """Size the pool from what a step leaves of `memory`."""
        return plan_kv_cache(
            self.config,
            pages,
            longest=self.longest,
            max_num_seqs=self.limits.max_num_seqs,
            free_bytes=memory.pool_bytes(needed_bytes=self.step_bytes),
        )

    def assemble(
        self,
        model: Model,
        plan: KVCachePlan,
        on_graph: Callable[[int, int], None],
        facts: dict[str, str],
        *,
        graphs: Captured = Captured.ALL,
        known: StepTimes | None = None,
        ranks: Ranks | None = None,
        num_host_slots: int = 0,
        pins_later: bool = False,
    ) -> LoadedEngine:
        """Allocate the pool, capture graphs, and derive the scheduler's limits from their timings.

        on_graph: called with the number of captured graphs and their total. num_host_slots: pages of host memory behind
        the pool. known: the times of steps, if an engine before this one measured them: then only the graphs that the
        first steps need are captured, and those of SOME follow between steps.
        pins_later: most of it is pinned after the start, see LoadedEngine.pin_host_memory().
        """
        config, limits, device = self.config, self.limited_to(plan.max_num_seqs).limits, self.device
        # Blocks of a disk are asked for by the first requests, and other engines map the memory
        is_later = pins_later and config.peer is None and config.kv_disk is None
        runner = self._make_runner(model, plan, limits, num_host_slots=num_host_slots, pins_later=is_later)
        # Steps that return hidden states of whole prompts use no graphs, so a model without a head needs none
        has_graphs = self.model_config.has_lm_head and not config.enforce_eager and not self.model_config.is_foreign
        captures = None
        if device.type == "cuda" and self.backend.is_graph_safe and has_graphs:
            on_graph(0, 0)
            captures = self._capture(runner, on_graph, graphs, known)
        times = None if captures is None else captures.mixed.times
        host_tier = host_tier_config(
            num_host_slots,
            page_s=runner.measure_host_page_s(),
            tokens_per_s=None if times is None else times.tokens_at_best_rate(1.0),
            peer=config.peer,
            has_disk=config.kv_disk is not None,
        )
        loaded = LoadedEngine(
            runner=runner,
            scheduler_config=msgspec.structs.replace(self._scheduler_config(plan, limits, times), host_tier=host_tier),
            overlap_depth=config.overlap_depth or _default_depth(config, device),
            facts=facts,
            compiler_loader=self.compiler_loader,
            model_config=self.model_config,
            plan=plan,
            dtype=self.dtype,
            num_loras=self.num_loras,
            speculative=config.speculative,
            ranks=ranks,
            captures=captures,
            slots=_slots_of(runner, ranks),
        )
        if not is_later:
            loaded.pin_host_memory()
        return loaded

    def _make_runner(
        self, model: Model, plan: KVCachePlan, limits: Limits, *, num_host_slots: int, pins_later: bool
    ) -> ModelRunner:
        """Allocate the pool and host memory, and return the runner that has them; see assemble()."""
        config, device = self.config, self.device
        pool = allocate_kv_cache(plan, self.rank_share, dtype=self.kv_dtype, device=device)
        host_pages = None
        if num_host_slots:
            host_pages = HostPages(
                pool,
                num_slots=num_host_slots,
                device=device,
                is_shared=config.peer is not None,
                pins_later=pins_later,
            )
        return ModelRunner(
            model,
            self.model_config,
            kv_pool=pool,
            plan=plan,
            backend=self.backend,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_samples=limits.max_num_samples,
            num_drafts=0 if config.speculative is None else config.speculative.num_tokens,
            device=device,
            dtype=self.dtype,
            lora_tokens=None if self.adapters is None else self.adapters.tokens,
            tp=self.tp,
            has_groups=self.sharing is not None,
            host_pages=host_pages,
        )

    def _capture(
        self, runner: ModelRunner, on_graph: Callable[[int, int], None], which: Captured, known: StepTimes | None
    ) -> GraphCaptures | None:
        """Capture graphs; None if their kernels are only to be launched."""
        started_s = time.monotonic()
        captures = runner.plan_graphs(CudaGraphDevice(), layers=self.model_config.layers_of_each_kind)
        captures.warm_up()
        if which is Captured.NONE:
            return None
        logger.info("graphs warm_up_s=%.2f", time.monotonic() - started_s)
        if known is not None:
            captures.capture_few(on_graph, known, long_step_s=_LONG_STEP_S)
        else:
            captures.capture(on_graph, is_partial=which is not Captured.ALL, long_step_s=_LONG_STEP_S)
        runner.replay_graphs(captures)
        return captures

    def _scheduler_config(self, plan: KVCachePlan, limits: Limits, times: StepTimes | None) -> SchedulerConfig:
        """Return the scheduler's limits, from the times of its graphs, if any."""
        config = self.config
        longest = _longest_step(config, limits, times)
        is_cpu = self.device.type == "cpu"
        efficient = longest
        if times is not None:
            efficient = min(times.efficient_tokens(_LONG_STEP_S), longest)
        elif is_cpu:
            efficient = min(max(_EFFICIENT_ON_CPU, limits.max_num_seqs), longest)
        max_cost = None if times is None else times.tokens_at_best_rate(_LONG_STEP_S)
        return SchedulerConfig(
            num_pages=plan.num_pages,
            block_size=plan.block_size,
            groups=plan.groups,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            min_decode_step_tokens=longest if config.is_offline else efficient,
            max_decode_step_tokens=longest,
            step_sizes=[] if times is None else list(times.seconds),
            max_mixed_cost=config.max_decode_step_tokens or max_cost,
            costly_context=_costly_context(self.model_config),
            max_model_len=plan.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            sharing=self.sharing,
            pin_share=config.pin_share,
            # above the size with nearly the best rate, a draft costs as much as a token
            max_num_samples=None if limits.max_num_samples is None else min(limits.max_num_samples, efficient),
        )


def _slots_of(runner: ModelRunner, ranks: Ranks | None) -> SlotSource | None:
    """Return what knows the slots that are pinned on all ranks; None: no memory is to be pinned."""
    pins = None if runner.host_pages is None else runner.host_pages.pins
    if pins is None or ranks is None:
        return pins
    slots = RankedSlots(pins, range(1, 1 + len(ranks.pids)))
    ranks.on_slots = slots.take
    return slots


def _default_depth(config: EngineConfig, device: torch.device) -> int:
    """Return the steps in flight. A prefill engine's steps are long, and its blocks would leave a step later."""
    return 2 if device.type == "cuda" and (config.peer is None or config.peer.role == "decode") else 1


def _longest_step(config: EngineConfig, limits: Limits, times: StepTimes | None) -> int:
    """Return the maximum tokens of a step with decode rows: the user's setting, else as measured here."""
    if config.max_decode_step_tokens:
        return config.max_decode_step_tokens
    if times is None or config.is_offline:
        return limits.max_num_batched_tokens
    return min(max(times.fitting_tokens(_LONG_STEP_S), 2 * limits.max_num_seqs), limits.max_num_batched_tokens)


def _costly_context(model: ModelConfig) -> int:
    """Return the context length at which attention takes a token as many operations as its linear layers."""
    products = sum(cache.head_dim + cache.v_head_dim for cache in model.kv_caches if cache.reach is None)
    linear = 2 * (model.num_active_parameters - model.vocab_size * model.hidden_size)
    return max(linear, 1) // max(2 * model.num_heads * products, 1)
