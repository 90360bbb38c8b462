"""Pages of equal size for layers with unequal caches: the layout, and what it wastes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device.page_plan import PagePlan, plan_pages, views_of_states
from kernels.elementwise.reference import INT8
from kernels.states import StateMetadata, save_states
from models.config.layer_cache import LayerCache
from models.config.layer_state import LayerState, StateTensor
from models.config.recurrence import DeltaNetConfig

KIB, MIB = 2**10, 2**20


def layers(*kinds: tuple[int, LayerCache]) -> list[LayerCache]:
    return [cache for count, cache in kinds for _ in range(count)]


def heads(num_kv_heads: int, head_dim: int, window: int | None = None) -> LayerCache:
    return LayerCache(num_kv_heads, head_dim, head_dim, window)


GEMMA3_27B = layers((52, heads(16, 128, 1024)), (10, heads(16, 128)))
GEMMA4_31B = layers((50, heads(16, 256, 1024)), (10, heads(4, 512)))
GEMMA3_4B = layers((29, heads(4, 256, 1024)), (5, heads(4, 256)))
GPT_OSS_120B = layers((18, heads(8, 64, 128)), (18, heads(8, 64)))


@pytest.mark.parametrize(
    ("caches", "num_tables", "page_bytes", "block_tokens", "wastes"),
    [
        (GEMMA3_27B, 2, 6.5 * MIB, (80, 16), (3.8, 0)),
        (GEMMA3_4B, 3, 0.9375 * MIB, (48, 16), (0, 3.3)),
        (GEMMA4_31B, 2, 12.5 * MIB, (160, 16), (0, 0)),
        (GPT_OSS_120B, 2, 576 * KIB, (16, 16), (0, 0)),
    ],
)
def test_the_page_of_a_published_shape(
    caches: list[LayerCache], num_tables: int, page_bytes: float, block_tokens: tuple[int, ...], wastes: tuple
) -> None:
    plan = plan_pages(caches, block_size=16, dtype=torch.bfloat16)
    assert len(plan.table_groups) == num_tables
    assert plan.page_bytes == page_bytes
    assert tuple(group.block_tokens for group in plan.groups) == block_tokens
    assert tuple(round(100 * group.waste, 1) for group in plan.groups) == wastes


def test_a_table_costs_as_much_as_one_percent_of_waste() -> None:
    """Split over 5 pages, Gemma 4's page would be 2.5 MiB for 6 tables."""
    wide = plan_pages(layers((2, heads(1, 64, 8)), (30, heads(1, 64))), block_size=16, dtype=torch.bfloat16)
    assert [len(group.tables) for group in wide.groups] == [1, 1]
    assert wide.groups[1].block_tokens == 16 * 15


@pytest.mark.parametrize(("num_windows", "num_tables", "block_tokens"), [(15, 1, 240), (53, 3, 288), (100, 4, 400)])
def test_hits_may_end_at_places_that_are_near_each_other(num_windows: int, num_tables: int, block_tokens: int) -> None:
    """One full layer beside all windows in a page would have blocks of 16 * num_windows tokens."""
    caches = layers((num_windows, heads(1, 64, 8)), (1, heads(1, 64)))
    full, window = plan_pages(caches, block_size=16, dtype=torch.bfloat16).groups
    assert (len(window.tables), full.block_tokens) == (num_tables, block_tokens)


def test_hits_end_at_common_multiples_of_all_blocks() -> None:
    """With one table for each group there would be blocks of 64 and of 96 tokens, and 192 tokens between two hits."""
    caches = layers((24, heads(1, 64, 8)), (4, heads(1, 64, 16)), (6, heads(1, 64)))
    plan = plan_pages(caches, block_size=16, dtype=torch.bfloat16)
    assert math.lcm(*(group.block_tokens for group in plan.groups)) == 96


def test_a_model_of_one_kind_has_one_table_and_a_page_is_a_block() -> None:
    plan = plan_pages(layers((32, heads(8, 128))), block_size=16, dtype=torch.bfloat16)
    assert plan.table_groups == (0,)
    assert plan.num_lanes == 64
    assert plan.page_bytes == 2 * 32 * 16 * 8 * 128 * 2
    assert [place.first_lane for place in plan.layers] == list(range(0, 64, 2))
    assert plan.unit_numbers(0, np.array([3, 7]), num_pages=10).tolist() == [3, 7]
    pool = torch.zeros(plan.num_lanes, 10, plan.lane_bytes // 2, dtype=torch.bfloat16)
    for keys, values, *_ in plan.views(pool):
        assert keys.shape == values.shape == (10, 16, 8, 128)
        assert keys.is_contiguous()
        assert values.is_contiguous()


def latent(rank: int, rope_dim: int) -> LayerCache:
    return LayerCache(1, rank + rope_dim, rank, values_in_keys=True)


@pytest.mark.parametrize(("num_layers", "bytes_per_token"), [(61, 70_272), (27, 31_104), (47, 54_144)])
@pytest.mark.parametrize("tp_size", [1, 8])
def test_latents_of_published_shapes_take_one_lane_a_layer(num_layers: int, bytes_per_token: int, tp_size: int) -> None:
    """DeepSeek-V3, V2-Lite and GLM-4.7-Flash; every rank keeps them all."""
    caches = layers((num_layers, latent(512, 64).share_of_rank(tp_size)))
    plan = plan_pages(caches, block_size=16, dtype=torch.bfloat16)
    assert plan.table_groups == (0,)
    assert (plan.num_lanes, plan.page_bytes) == (num_layers, 16 * bytes_per_token)
    assert plan.groups[0].waste == 0
    assert plan.for_layers(caches[:2]).num_lanes == 2
    pool = torch.zeros(plan.num_lanes, 3, plan.lane_bytes // 2, dtype=torch.bfloat16)
    for keys, values, *_ in plan.views(pool):
        assert (keys.shape, values.shape) == ((3, 16, 1, 576), (3, 16, 1, 512))
        assert keys.is_contiguous()
        assert (values.data_ptr(), values.stride()) == (keys.data_ptr(), keys.stride())


def test_latents_may_share_pages_with_layers_that_keep_keys_and_values() -> None:
    plan = plan_pages(layers((6, latent(12, 4)), (2, heads(1, 16, 8))), block_size=4, dtype=torch.float32)
    assert [
        (group.num_layers, group.lanes_per_tensor, group.lanes_per_layer, group.waste) for group in plan.groups
    ] == [
        (6, 1, 1, 0),
        (2, 3, 6, 0),  # six lanes, too: three times as many tokens of each of two layers
    ]


def test_shared_layers_own_nothing_and_read_their_owners_place() -> None:
    shared = LayerCache(2, 8, 8, 4, shares=0)
    plan = plan_pages([heads(2, 8, 4), heads(2, 8), shared], block_size=16, dtype=torch.float32)
    assert plan.layers[2] == plan.layers[0]
    assert plan.num_lanes == 2


def test_a_window_needs_no_more_than_its_tokens_and_two_blocks() -> None:
    plan = plan_pages(GPT_OSS_120B, block_size=16, dtype=torch.bfloat16)
    full, window = plan.groups
    assert [full.num_pages(length) for length in (1, 16, 17, 4096)] == [1, 1, 2, 256]
    assert [window.num_pages(length) for length in (1, 16, 17, 160, 161, 4096)] == [1, 1, 2, 10, 10, 10]
    assert window.num_pages(4096, in_flight=512) == (128 + 512) // 16 + 2
    for num_pages in (2, 9, 20, 21, 22, 1000):
        longest = plan.longest_request(num_pages, most=10**6)
        assert plan.num_pages(longest) <= num_pages < plan.num_pages(longest + 1)
    assert plan.longest_request(10**9, most=131_072) == 131_072
    assert plan.longest_request(0, most=131_072) == 0


_CACHES = st.builds(
    lambda heads, size, v_size, window, is_latent: LayerCache(
        heads, 2 * size, min(2 * v_size, 2 * size) if is_latent else 2 * v_size, window, values_in_keys=is_latent
    ),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([2, 4, 5, 8]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([None, 4, 9]),
    st.booleans(),
)


@settings(deadline=None)
@given(data=st.data())
def test_no_number_of_the_pool_is_used_twice(data: st.DataObject) -> None:
    """Every layer's every token has its own place in a page, for any shapes."""
    kinds = data.draw(st.lists(_CACHES, min_size=1, max_size=3, unique=True))
    caches = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=9))
    plan = plan_pages(caches, block_size=data.draw(st.sampled_from([1, 4])), dtype=torch.float32)
    num_pages, num_tables = 3, len(plan.table_groups)
    pool = torch.zeros(plan.num_lanes, num_pages, plan.lane_bytes // 4)
    assert {place.table for place in plan.layers} == set(range(num_tables))
    page_of_table = data.draw(st.lists(st.integers(0, num_pages - 1), min_size=num_tables, max_size=num_tables))
    for place, (keys, values, *_) in zip(plan.layers, plan.views(pool), strict=True):
        page = page_of_table[place.table]
        units = plan.unit_numbers(place.group, np.array([page]), num_pages=num_pages).tolist()
        assert len(set(units)) == len(units) == plan.groups[place.group].block_tokens // plan.block_size
        assert max(units) < keys.shape[0]
        for tensor in (keys, values)[: plan.groups[place.group].cache.num_tensors]:
            tensor[units] += 1
    assert not any(pool[:, page].any() for page in set(range(num_pages)) - set(page_of_table))
    if len(set(page_of_table)) == num_tables:
        assert float(pool.max()) == 1
    used = sum(cache.values_per_token * plan.groups[place.group].block_tokens
               for cache, place in zip(caches, plan.layers, strict=True))  # fmt: skip
    assert float(pool.sum()) == used
    total = sum(len(group.tables) * plan.page_bytes // 4 for group in plan.groups)
    wasted = sum(group.waste * len(group.tables) * plan.page_bytes // 4 for group in plan.groups)
    assert used + wasted == pytest.approx(total, abs=len(plan.groups))


@settings(deadline=None)
@given(st.data())
def test_scales_of_an_int8_pool_lie_behind_their_numbers_and_nowhere_else(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(_CACHES.filter(lambda cache: not cache.values_in_keys), min_size=1, max_size=3))
    caches = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    plan = plan_pages(caches, block_size=data.draw(st.sampled_from([1, 4, 16])), dtype=INT8)
    num_pages = 1 + len(plan.table_groups)
    pool = torch.zeros(plan.num_lanes, num_pages, plan.lane_bytes, dtype=INT8)
    written: list[tuple[torch.Tensor, list[int], float]] = []
    for index, (place, view) in enumerate(zip(plan.layers, plan.views(pool), strict=True)):
        units = plan.unit_numbers(place.group, np.array([1 + place.table]), num_pages=num_pages).tolist()
        assert view.keys.data_ptr() % 16 == view.values.data_ptr() % 16 == pool.data_ptr() % 16
        assert view.keys.stride(0) == view.values.stride(0) == 4 * view.token_scales.k.stride(0)
        for number, tensor in enumerate((view.keys, view.values, view.token_scales.k, view.token_scales.v)):
            tensor[units] = 4 * index + number + 1
            written.append((tensor, units, 4 * index + number + 1))
    assert all(bool((tensor[units] == value).all()) for tensor, units, value in written)
    assert not pool[:, 0].any()
    for group in plan.groups:
        used = group.num_layers * group.cache.token_bytes(INT8) * group.block_tokens
        assert used == pytest.approx((1 - group.waste) * len(group.tables) * plan.page_bytes)


def test_an_int8_page_of_a_usual_model_wastes_nothing() -> None:
    plan = plan_pages(layers((32, heads(8, 128))), block_size=16, dtype=INT8)
    assert (plan.page_bytes, plan.groups[0].waste) == (2 * 32 * 16 * 8 * (128 + 4), 0)
    (keys, _, _, scales), *_ = plan.views(torch.zeros(plan.num_lanes, 10, plan.lane_bytes, dtype=INT8))
    assert keys.stride() == (16 * 8 * 132, 1024, 128, 1)
    assert (scales.k.shape, scales.k.stride()) == ((10, 16, 8), (4 * 8 * 132, 1, 16))


def test_units_of_a_smaller_layer_lie_side_by_side_in_a_row() -> None:
    plan: PagePlan = plan_pages(layers((2, heads(4, 8, 8)), (1, heads(1, 8))), block_size=4, dtype=torch.float32)
    full = plan.groups[0]
    assert (full.lanes_per_tensor, full.units_per_row, full.block_tokens) == (2, 4, 32)
    units = plan.unit_numbers(0, np.array([1, 0]), num_pages=3)
    assert units.tolist() == [4, 5, 6, 7, 16, 17, 18, 19, 0, 1, 2, 3, 12, 13, 14, 15]
    assert plan.num_columns(33) == 16


def test_a_rest_of_a_row_is_left_between_units() -> None:
    """3 heads beside 2: one unit of the smaller layer in each row, and a third of it is not used."""
    caches = layers((1, heads(3, 8, 8)), (1, heads(2, 8)))
    plan = plan_pages(caches, block_size=4, dtype=torch.float32)
    window, full = plan.views(torch.zeros(plan.num_lanes, 3, plan.lane_bytes // 4))
    assert window[0].is_contiguous()
    assert not full[0].is_contiguous()
    assert full[0].stride() == (4 * 3 * 8, 16, 8, 1)
    assert plan.groups[0].waste == pytest.approx(1 / 3)


def test_a_small_model_with_the_same_kinds_has_the_same_tensors() -> None:
    """What kernels are compiled with before the weights are read."""
    plan = plan_pages(GEMMA4_31B, block_size=16, dtype=torch.bfloat16)
    small = plan.for_layers([GEMMA4_31B[0], GEMMA4_31B[-1]])
    assert small.groups == plan.groups
    assert small.num_lanes == 10
    shapes = {keys.shape for keys, *_ in plan.views(torch.zeros(plan.num_lanes, 2, plan.lane_bytes // 2))}
    assert {keys.shape for keys, *_ in small.views(torch.zeros(small.num_lanes, 2, plan.lane_bytes // 2))} == shapes


# Qwen3.5 35B-A3B: 30 of 40 layers are recurrent
DELTA_NET = DeltaNetConfig(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4).layer_state
QWEN35 = ([None, None, None, heads(2, 256)] * 10, [DELTA_NET, DELTA_NET, DELTA_NET, None] * 10)


def test_the_page_of_a_model_with_states_is_that_of_its_attention() -> None:
    caches, states = QWEN35
    plan = plan_pages(caches, states=states, block_size=16, dtype=torch.bfloat16)
    assert plan.table_groups == (0,)
    assert (plan.lane_bytes, plan.num_lanes, plan.page_bytes) == (16 * KIB, 20, 320 * KIB)
    assert plan.groups[0].block_tokens == 16
    assert plan.groups[0].waste == 0
    assert plan.state is not None
    assert (plan.state_pages, plan.state.save_tokens, plan.state.num_layers) == (203, 64, 30)
    assert 1 - plan.state.num_bytes / (203 * plan.page_bytes) < 0.01
    assert plan.num_pages(1) == 204
    assert plan.num_pages(4096) == 256 + 203
    assert plan.longest_request(202, most=100) == 0
    assert plan.longest_request(213, most=1000) == 160
    assert [place is None for place in plan.layers] == [cache is None for cache in caches]


@pytest.mark.parametrize(("block_size", "save_tokens"), [(4, 64), (16, 64), (48, 192), (64, 64), (128, 128)])
def test_states_are_saved_at_multiples_of_64_and_of_the_block(block_size: int, save_tokens: int) -> None:
    plan = plan_pages(*QWEN35[:1], states=QWEN35[1], block_size=block_size, dtype=torch.bfloat16)
    assert plan.state is not None
    assert plan.state.save_tokens == save_tokens


def test_a_lane_holds_at_least_a_row_of_every_state() -> None:
    wide = LayerState(StateTensor(((1, 4),), 3), StateTensor(((2, 4),), 70))
    plan = plan_pages([heads(1, 3), None], states=[None, wide], block_size=1, dtype=torch.bfloat16)
    assert plan.lane_bytes == 288
    (none, views) = views_of_states(torch.zeros(plan.num_lanes, 9, 144, dtype=torch.bfloat16), [None, wide])
    assert none == ()
    assert [(view.num_rows, view.row_size, view.num_pieces) for view in views] == [(4, 3, 1), (8, 70, 8)]
    assert plan.state_pages == 5


@settings(deadline=None)
@given(data=st.data())
def test_no_number_of_a_state_is_used_twice(data: st.DataObject) -> None:
    """Every layer's every row has its own place in a state's pages, and its pages are large enough."""
    tensors = st.builds(lambda rows, size: StateTensor(((1, rows),), size), st.integers(1, 9), st.integers(1, 20))
    drawn = st.none() | st.builds(LayerState, tensors, st.none() | tensors)
    states = [*data.draw(st.lists(drawn, min_size=1, max_size=6)), LayerState(StateTensor(((1, 2),), 3))]
    caches = [None] * len(states)
    caches[data.draw(st.integers(0, len(states) - 1))] = heads(data.draw(st.integers(1, 4)), 2)
    plan = plan_pages(caches, states=states, block_size=4, dtype=torch.float32)
    num_pages = plan.state_pages
    pool = torch.zeros(plan.num_lanes, 1 + 2 * num_pages, plan.lane_bytes // 4)
    pages = 1 + torch.randperm(2 * num_pages).view(2, num_pages).to(torch.int32)
    rows = StateMetadata(torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([1]), pages, None, 1, None)
    total = 0
    for layer, views in zip(states, views_of_states(pool, states), strict=True):
        for view, tensor in zip(views, () if layer is None else layer.tensors, strict=True):
            assert not pool.flatten()[0]
            before = pool.sum()
            save_states(view, rows, torch.ones(1, view.num_rows, view.row_size))
            total += tensor.num_bytes // 4
            assert float(pool.sum()) == total > before
    assert not pool[:, 0].any()
    assert not pool[:, pages[0].long()].any()
    attended = next(layer for layer, cache in enumerate(caches) if cache is not None)
    small = plan.for_layers([caches[attended], None], [states[attended], states[-1]])
    assert small.num_lanes <= plan.num_lanes
    assert small.state == plan.state
    assert small.num_lanes * plan.state_pages >= sum(
        view.num_pieces for views in views_of_states(pool[:1], [states[attended], states[-1]]) for view in views
    )
