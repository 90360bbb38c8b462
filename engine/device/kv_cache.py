"""plan_kv_cache() sizes the paged KV pool; allocate_kv_cache() allocates it. Imports torch.

By default the pool takes all memory that the device can spare, and the context limit shrinks to what the pool holds for
one request; the engine logs this. An explicit setting is met or refused, never reduced. engine/device/page_plan.py has
the layout of a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.device.device_state import Staging
from engine.device.memory import format_size, zeros
from engine.device.page_plan import PagePlan, views_of_states
from engine.interface.config import CacheGroup, EngineConfig
from engine.interface.errors import StartupError
from kernels.states import StateView
from models.config.model_config import ModelConfig
from models.context import LayerKV

_MIN_BLOCKS = 2  # minimum for one request; a shorter context is useless
_COPY_BYTES = 64 * 2**20  # of pages that are copied at once: as much memory is needed for a moment


@dataclass(frozen=True)
class KVCachePlan:
    """The pool's layout and size. num_pages includes page 0, which is for padding."""

    pages: PagePlan
    num_pages: int
    max_model_len: int  # tokens
    max_num_seqs: int  # requests at once

    @property
    def block_size(self) -> int:
        """The tokens of a block of the attention kernels."""
        return self.pages.block_size

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers whose caches live alike, for the scheduler."""
        groups = [
            CacheGroup(
                group.cache.kind, group.block_tokens, group.pages_per_block, group.cache.window, group.cache.chunk
            )
            for group in self.pages.groups
        ]
        if self.pages.state is not None:  # its table follows those of keys and values
            groups.append(CacheGroup("state", self.pages.state.save_tokens, self.pages.state.num_pages))
        return tuple(groups)

    @property
    def num_tokens(self) -> int:
        """The pool's capacity: the tokens of as many requests of max_model_len as it holds, parts included."""
        steps = [group.block_tokens for group in self.pages.groups if group.cache.kind == "full"]
        length = -(-self.max_model_len // max(steps, default=1)) * max(steps, default=1)
        return (self.num_pages - 1) * length // self.pages.num_pages(length)

    def num_requests(self, num_tokens: int) -> int:
        """Return the number of requests of num_tokens that the pool holds."""
        return (self.num_pages - 1) // self.pages.num_pages(num_tokens)

    @property
    def bytes_per_page(self) -> int:
        """The bytes of one page."""
        return self.pages.page_bytes

    @property
    def bytes_per_block(self) -> int:
        """The bytes of the largest block of any group, on one rank."""
        return self.bytes_per_page * max(group.pages_per_block for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """The bytes of one request's state; 0: no layer has one."""
        return self.pages.state_pages * self.bytes_per_page

    @property
    def num_bytes(self) -> int:
        """The pool's size in bytes, padding included."""
        return self.num_pages * self.bytes_per_page


def smallest_pool_bytes(config: EngineConfig, pages: PagePlan, *, longest: int) -> int:
    """Return the bytes of a pool that holds one short request, or the configured size. longest: as plan_kv_cache."""
    least = _least_pages(pages, config.max_model_len or longest)
    return config.kv_cache_memory_bytes or (least + 1) * pages.page_bytes


def plan_kv_cache(
    config: EngineConfig,
    pages: PagePlan,
    *,
    longest: int,
    max_num_seqs: int,
    free_bytes: int,
) -> KVCachePlan:
    """Size the pool from `free_bytes`. Raises StartupError, which names the size that fits and the flag to change.

    longest: the tokens that the model's positions reach.
    """
    if config.max_model_len is not None and config.max_model_len > longest:
        raise StartupError(
            f"--max-model-len {config.max_model_len} exceeds the {longest} tokens this model's positions reach."
        )
    budget = config.kv_cache_memory_bytes if config.kv_cache_memory_bytes is not None else free_bytes
    wanted_len = config.max_model_len or longest
    usable_pages = max(budget // pages.page_bytes - 1, 0)
    # Running requests never use more than this at full length, even if all that left a window stayed cached, and one
    # saved state of each
    most_pages = pages.num_pages(wanted_len, in_flight=wanted_len) + config.enable_prefix_caching * pages.state_pages
    usable_pages = min(usable_pages, max_num_seqs * most_pages)
    least_pages = _least_pages(pages, wanted_len)
    if usable_pages < least_pages:
        least = format_size((least_pages + 1) * pages.page_bytes)
        if pages.state is not None:
            least += f", of which {format_size(pages.state_pages * pages.page_bytes)} are the state of one request"
        raise StartupError(
            f"The KV cache needs at least {least}, {_what_there_is(config, budget)}: use {_more_memory(config)}."
        )
    fitting_len = pages.longest_request(usable_pages, most=wanted_len)
    if config.max_model_len is not None and fitting_len < wanted_len:
        needed = format_size((pages.num_pages(wanted_len) + 1) * pages.page_bytes)
        raise StartupError(
            f"Context {wanted_len} needs {needed} of KV cache, "
            f"{_what_there_is(config, budget)}: use --max-model-len {fitting_len}, or {_more_memory(config)}."
        )
    return KVCachePlan(pages, usable_pages + 1, fitting_len, max_num_seqs)


def plan_for_states(config: EngineConfig, plan_for: Callable[[int], KVCachePlan], *, wanted: int) -> KVCachePlan:
    """Return the pool for as many requests at once, at most `wanted`, as have room for a state and a short prompt each.

    plan_for: plans the pool for a number of requests; more of them leave it less memory. Raises StartupError, which
    says how many fit, if the configuration wants more.
    """
    wanted_plan, low, high = _if_it_fits(plan_for, wanted), 1, wanted - 1
    if wanted_plan is not None:
        return wanted_plan
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if _if_it_fits(plan_for, middle) is None else (middle, high)
    fitting = plan_for(low)
    if config.max_num_seqs is None:
        return fitting
    each, needed = format_size(fitting.state_bytes), format_size(wanted * fitting.state_bytes)
    raise StartupError(
        f"--max-num-seqs {wanted} needs {needed} for the states of its requests, {each} for each, and"
        f" {low} fit{'s' * (low == 1)} into the KV cache of {format_size(fitting.num_bytes)}:"
        f" use --max-num-seqs {low}, or {_more_memory(config)}."
    )


def _if_it_fits(plan_for: Callable[[int], KVCachePlan], num_requests: int) -> KVCachePlan | None:
    try:
        plan = plan_for(num_requests)
    except StartupError:
        return None
    assert plan.pages.state is not None, "no layer has a state"
    short = min(plan.max_model_len, plan.pages.state.save_tokens)
    return plan if plan.num_requests(short) >= num_requests else None


@dataclass(frozen=True)
class KVPool:
    """The pool's memory, and each layer's part of it."""

    rows: torch.Tensor  # [num_lanes, num_pages, numbers in a row]
    layers: list[LayerKV | None]  # by layer; None: without attention
    states: list[tuple[StateView, ...]] = field(default_factory=list)  # by layer; (): none. []: no layer has a state

    def zero(self, page_ids: list[int], staging: Staging) -> None:
        """Fill pages with zeros. Does not block."""
        where = staging.send_large(np.array(page_ids))
        self.rows.view(torch.uint8).index_fill_(1, where, 0)  # as bytes: torch cannot fill fp8 on every device

    def copy(self, pairs: list[tuple[int, int]], staging: Staging) -> None:
        """Copy pages (source, target), of which no target is a source. Does not block."""
        rows = self.rows.view(torch.int32)  # bits, whatever they mean
        where = staging.send_large(np.array(pairs, dtype=np.int64).T.copy())
        num_at_once = max(_COPY_BYTES // (rows.shape[0] * rows.shape[2] * 4), 1)
        for sources, targets in zip(*(pages.split(num_at_once) for pages in where), strict=True):
            rows.index_copy_(1, targets, rows.index_select(1, sources))


def allocate_kv_cache(plan: KVCachePlan, model: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> KVPool:
    """Allocate the pool for the model's layers, which may be fewer than planned, with zeros.

    Quire's attention never counts masked slots; flash-attn may, as 0 × value, so that unwritten ones must be finite.
    """
    pages = plan.pages.for_layers(model.caches, model.states)
    shape = (pages.num_lanes, plan.num_pages, pages.lane_bytes // dtype.itemsize)
    try:
        rows = zeros(shape, dtype, device)
    except (RuntimeError, OSError, OverflowError) as error:  # torch.OutOfMemoryError is a RuntimeError; others: mmap
        size = format_size(plan.num_bytes)
        raise StartupError(f"The KV cache of {size} cannot be allocated: use a smaller --kv-cache-memory.") from error
    states = [] if pages.state is None else views_of_states(rows, model.states)
    return KVPool(rows, pages.views(rows), states)


def _least_pages(pages: PagePlan, wanted_len: int) -> int:
    return pages.num_pages(min(wanted_len, _MIN_BLOCKS * pages.block_size))


def _what_there_is(config: EngineConfig, budget: int) -> str:
    if config.kv_cache_memory_bytes is not None:
        return f"--kv-cache-memory gives {format_size(budget)}"
    return f"and {format_size(budget)} are free"


def _more_memory(config: EngineConfig) -> str:
    if config.kv_cache_memory_bytes is not None:
        return "a larger --kv-cache-memory"
    return "a larger --gpu-memory-utilization or --kv-cache-memory"
