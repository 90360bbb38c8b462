"""plan_pages(): the layout of one pool of equal pages that layers with unequal caches share. Pure arithmetic.

The pool is one allocation of lanes, each [num_pages, lane_bytes]; page p is row p of all lanes. A unit is the block of
the attention kernels: block_size tokens of keys, or of values, of one layer; in an int8 pool their scales follow, by
head. A lane's row has the size of the largest layer's unit. A group is the layers whose caches live alike: same kind,
window and heads. Each of its layers takes k neighbouring lanes for keys and k for values, unless keys hold the values
(latent attention), with m units in each row,
so a page holds T = block_size * k * m tokens of these layers. Seen from one layer, its k lanes are one tensor of
k * num_pages * m units, and unit s of page p is number ((s // m) * num_pages + p) * m + s % m: kernels read a block
table of units and know nothing of pages.

A group whose layers do not all fit in one page takes several pages for a block, each with some of the layers and a
block table of its own. The planner takes the least of waste, plus 1 % for each table, plus what hits lose: a hit ends
where blocks of all groups do, so on average half a step of common multiples of T is computed again, which counts as a
share of a prompt of 4,096 tokens. With one group, k, m and the number of tables are 1 and nothing is wasted.

A request's state is cut into pieces of one lane's row each (kernels/states.py), which fill as many pages as they need.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.elementwise.reference import INT8, INT8_SCALE, KVScales
from kernels.states import StateView, place_states, view_states
from models.config.layer_cache import LayerCache
from models.config.layer_state import LayerState
from models.context import LayerKV

_TABLE_COST = 0.01  # of a block table, in waste
_HIT_LOSS = 1 / 2 / 4096  # of a token between two places where hits may end, in waste
_ALIGNMENT = 16  # bytes: kernels load as many at once
_STATE_TOKENS = 64  # states are saved at multiples of it, as scans of prompts are cut there


@dataclass(frozen=True)
class GroupPlan:
    """The place of one group's layers in the pages."""

    cache: LayerCache  # of each of its layers
    num_layers: int
    tables: range  # numbers of its block tables, one for each page of a block
    layers_per_page: int
    lanes_per_tensor: int  # k
    units_per_row: int  # m
    block_tokens: int  # T
    waste: float  # share of its pages' bytes that no layer uses

    @property
    def pages_per_block(self) -> int:
        """The pages that hold one block, each with some of the layers."""
        return len(self.tables)

    @property
    def lanes_per_layer(self) -> int:
        """The lanes of one layer's keys and values."""
        return self.cache.num_tensors * self.lanes_per_tensor

    @property
    def units_per_page(self) -> int:
        """The units of one layer in a page."""
        return self.lanes_per_tensor * self.units_per_row

    def num_pages(self, num_tokens: int, *, in_flight: int = 0) -> int:
        """Return the most pages that a request of num_tokens holds.

        in_flight: tokens of one step: a window's blocks are taken as tokens come, and given back at the commit.
        """
        blocks = -(-num_tokens // self.block_tokens)
        if self.cache.reach is not None:
            blocks = min(blocks, (self.cache.reach + in_flight + self.block_tokens - 2) // self.block_tokens + 2)
        return blocks * self.pages_per_block


@dataclass(frozen=True)
class LayerPlace:
    """The block table that a layer reads, and its lanes: k for keys from first_lane on, then k for values, if any."""

    group: int
    table: int
    first_lane: int


@dataclass(frozen=True)
class StatePlan:
    """The pages of one request's state."""

    num_pages: int
    save_tokens: int  # states may be saved at its multiples
    num_layers: int
    num_bytes: int  # of its tensors


@dataclass(frozen=True)
class PagePlan:
    """The layout of a page."""

    block_size: int  # tokens of a unit
    num_lanes: int
    lane_bytes: int
    groups: tuple[GroupPlan, ...]
    # of each layer of the model; a shared cache is its owner's; None: a layer without attention
    layers: tuple[LayerPlace | None, ...]
    state: StatePlan | None = None  # None: no layer has a state

    @property
    def page_bytes(self) -> int:
        """The bytes of one page."""
        return self.num_lanes * self.lane_bytes

    @property
    def table_groups(self) -> tuple[int, ...]:
        """The group of each block table of a request."""
        return tuple(index for index, group in enumerate(self.groups) for _ in group.tables)

    @property
    def state_pages(self) -> int:
        """The pages of one request's state; 0: no layer has one."""
        return 0 if self.state is None else self.state.num_pages

    def num_pages(self, num_tokens: int, *, in_flight: int = 0) -> int:
        """Return the most pages that a request of num_tokens holds; see GroupPlan.num_pages."""
        growing = sum(group.num_pages(num_tokens, in_flight=in_flight) for group in self.groups)
        return growing + self.state_pages

    def longest_request(self, num_pages: int, *, most: int) -> int:
        """Return the largest number of tokens, up to `most`, whose request fits in num_pages pages."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_pages(middle) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low

    def num_columns(self, num_tokens: int) -> int:
        """Return the units in the longest block table of a request of num_tokens."""
        return max(-(-num_tokens // group.block_tokens) * group.units_per_page for group in self.groups)

    def unit_numbers(self, group: int, page_ids: np.ndarray, *, num_pages: int) -> np.ndarray:
        """Return the units of pages in the tensors of a group's layers, in order: [N] → [N * units_per_page]."""
        rows = self.groups[group].units_per_row
        units = np.arange(self.groups[group].units_per_page)
        return ((units // rows * num_pages + page_ids[:, None]) * rows + units % rows).reshape(-1)

    def for_layers(self, caches: Sequence[LayerCache | None], states: Sequence[LayerState | None] = ()) -> PagePlan:
        """Return this plan with only some layers, which need fewer lanes; all else stays.

        caches, states: of these layers; no states: none has one.
        """
        layers = tuple(_places(self.groups, caches))
        places = [place for place in layers if place is not None]
        lanes = max(place.first_lane + self.groups[place.group].lanes_per_layer for place in places)
        if self.state is not None:
            num_pieces = place_states(state_shapes(states), piece=self.lane_bytes // 4)[1]
            lanes = max(lanes, -(-num_pieces // self.state.num_pages))
        return dataclasses.replace(self, layers=layers, num_lanes=lanes)

    def views(self, pool: torch.Tensor) -> list[LayerKV | None]:
        """Return each layer's keys and values, [units, block_size, num_kv_heads, head dimension], in the pool.

        pool: [num_lanes, num_pages, numbers in a row]. A unit is contiguous; so is the tensor, unless its layer's units
        leave a rest of the row, or scales follow. None: a layer without attention.
        """
        return [None if place is None else self._views_of(pool, place) for place in self.layers]

    def _views_of(self, pool: torch.Tensor, place: LayerPlace) -> LayerKV:
        group = self.groups[place.group]
        cache, lanes = group.cache, group.lanes_per_tensor
        _, num_pages, row = pool.shape
        num_units, stride = lanes * num_pages * group.units_per_row, row // group.units_per_row

        def view(first_lane: int, size: int) -> torch.Tensor:
            shape = (num_units, self.block_size, cache.num_kv_heads, size)
            return pool.as_strided(shape, (stride, cache.num_kv_heads * size, size, 1), first_lane * num_pages * row)

        def view_scales(first_lane: int, size: int) -> torch.Tensor:
            shape = (num_units, self.block_size, cache.num_kv_heads)
            first = first_lane * num_pages * row + _scales_place(self.block_size * cache.num_kv_heads * size)
            item = INT8_SCALE.itemsize
            return pool.view(INT8_SCALE).as_strided(shape, (stride // item, 1, self.block_size), first // item)

        keys = view(place.first_lane, cache.head_dim)
        if cache.values_in_keys:
            return LayerKV(keys, keys[..., : cache.v_head_dim], place.table)
        first_values = place.first_lane + lanes
        scales = None
        if pool.dtype == INT8:
            scales = KVScales(
                k=view_scales(place.first_lane, cache.head_dim), v=view_scales(first_values, cache.v_head_dim)
            )
        return LayerKV(keys, view(first_values, cache.v_head_dim), place.table, scales)


def plan_pages(
    caches: Sequence[LayerCache | None],
    *,
    block_size: int,
    dtype: torch.dtype,
    states: Sequence[LayerState | None] = (),
) -> PagePlan:
    """Plan the pages of a model with these layers, some of which have attention.

    caches: by layer; None: no attention. states: by layer; None: no state. block_size: tokens of a unit; dtype: of keys
    and values; states are float32.
    """
    kinds: dict[LayerCache, int] = {}
    for cache in caches:
        if cache is not None and cache.shares is None:
            kinds[cache] = kinds.get(cache, 0) + 1
    kinds = dict(sorted(kinds.items(), key=lambda kind: (kind[0].reach is not None, kind[0].reach or 0)))
    lane_bytes = _lane_bytes(kinds, block_size, dtype, states)
    candidates = []
    for num_lanes in sorted(
        {cache.num_tensors * size for cache, count in kinds.items() for size in _page_sizes(count)}
    ):
        groups: list[GroupPlan] = []
        for cache, count in kinds.items():
            options = _split_options(cache, count, num_lanes, lane_bytes, block_size, dtype)
            best = min(options, key=_cost, default=None)
            if best is None:
                break
            first = groups[-1].tables.stop if groups else 0
            groups.append(dataclasses.replace(best, tables=range(first, first + best.pages_per_block)))
        else:
            layers = tuple(_places(groups, caches))
            state = _plan_states(states, num_lanes, lane_bytes, block_size)
            candidates.append(PagePlan(block_size, num_lanes, lane_bytes, tuple(groups), layers, state))
    return min(candidates, key=lambda plan: (_plan_cost(plan), plan.page_bytes))


def state_shapes(states: Sequence[LayerState | None]) -> list[list[tuple[int, int]]]:
    """Return by layer the (num_rows, row_size) of its state's tensors."""
    return [[] if state is None else state.shapes for state in states]


def views_of_states(pool: torch.Tensor, states: Sequence[LayerState | None]) -> list[tuple[StateView, ...]]:
    """Return the views of each layer's state in a pool as in PagePlan.views, whatever its dtype; (): no state."""
    return view_states(pool.view(torch.float32), state_shapes(states))


def _lane_bytes(
    kinds: Iterable[LayerCache], block_size: int, dtype: torch.dtype, states: Sequence[LayerState | None]
) -> int:
    """Return the bytes of a lane's row: of the largest unit, and of a row of any state tensor."""
    units = max(_unit_bytes(cache, block_size, dtype) for cache in kinds)
    rows = [4 * row_size for tensors in state_shapes(states) for _, row_size in tensors]
    if not rows:
        return units
    return -(-max(units, *rows) // _ALIGNMENT) * _ALIGNMENT


def _plan_states(
    states: Sequence[LayerState | None], num_lanes: int, lane_bytes: int, block_size: int
) -> StatePlan | None:
    kept = [state for state in states if state is not None]
    if not kept:
        return None
    _, num_pieces = place_states(state_shapes(states), piece=lane_bytes // 4)
    save_tokens = math.lcm(_STATE_TOKENS, block_size)
    return StatePlan(-(-num_pieces // num_lanes), save_tokens, len(kept), sum(state.num_bytes for state in kept))


def _plan_cost(plan: PagePlan) -> float:
    steps, cost = [group.block_tokens for group in plan.groups], sum(map(_cost, plan.groups))
    if plan.state is not None:
        steps.append(plan.state.save_tokens)
        cost += 1 - plan.state.num_bytes / (plan.state.num_pages * plan.page_bytes)
    return cost + _HIT_LOSS * math.lcm(*steps)


def _cost(group: GroupPlan) -> float:
    return group.waste + _TABLE_COST * group.pages_per_block


def _unit_bytes(cache: LayerCache, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of the larger of a layer's units, of keys and of values."""
    num_heads = block_size * cache.num_kv_heads
    num_bytes = num_heads * max(cache.head_dim, cache.v_head_dim) * dtype.itemsize
    if dtype != INT8:
        return num_bytes
    return -(-(_scales_place(num_bytes) + num_heads * INT8_SCALE.itemsize) // _ALIGNMENT) * _ALIGNMENT


def _scales_place(num_bytes: int) -> int:
    """Return where the scales of a unit begin, in bytes: behind its num_bytes of int8 numbers, aligned."""
    return -(-num_bytes // INT8_SCALE.itemsize) * INT8_SCALE.itemsize


def _page_sizes(num_layers: int) -> list[int]:
    """Return the possible numbers of layers in a page, if as many pages as needed hold all layers."""
    return sorted({-(-num_layers // num_pages) for num_pages in range(1, num_layers + 1)}, reverse=True)


def _split_options(
    cache: LayerCache, num_layers: int, num_lanes: int, lane_bytes: int, block_size: int, dtype: torch.dtype
) -> Iterator[GroupPlan]:
    """Yield the ways to place a group's layers in pages of num_lanes lanes."""
    unit_bytes = _unit_bytes(cache, block_size, dtype)
    rows = next(
        rows
        for rows in range(lane_bytes // unit_bytes, 0, -1)
        if rows == 1 or lane_bytes % (rows * _ALIGNMENT) == 0  # every unit then starts at a multiple of it
    )
    for size in _page_sizes(num_layers):
        lanes = num_lanes // (cache.num_tensors * size)
        if not lanes:
            continue
        num_pages, block_tokens = -(-num_layers // size), block_size * lanes * rows
        used = num_layers * cache.token_bytes(dtype) * block_tokens
        waste = 1 - used / (num_pages * num_lanes * lane_bytes)
        yield GroupPlan(cache, num_layers, range(num_pages), size, lanes, rows, block_tokens, waste)


def _places(groups: Sequence[GroupPlan], caches: Sequence[LayerCache | None]) -> Iterator[LayerPlace | None]:
    """Yield the place of each layer; None: it has no attention."""
    index_of = {group.cache: index for index, group in enumerate(groups)}
    counts = [0] * len(groups)
    places: list[LayerPlace | None] = []
    for cache in caches:
        if cache is None:
            places.append(None)
        elif cache.shares is not None:
            places.append(places[cache.shares])
        else:
            index = index_of[cache]
            group = groups[index]
            page, place = divmod(counts[index], group.layers_per_page)
            counts[index] += 1
            places.append(LayerPlace(index, group.tables[page], group.lanes_per_layer * place))
        yield places[-1]
