"""The decode kernel for 8-bit pools on Hopper against float64: heads, blocks, scales, kinds of layers, graphs."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import pad

from kernels.attention.base import AttentionMetadata
from kernels.elementwise.reference import FP8, UNSCALED, KVScales
from tests.unit.kernels.triton_cases.ragged import (
    as_fp8,
    as_int8,
    empty_int8,
    make_problem,
    reference,
    relative_error,
)
from tests.unit.kernels.triton_cases.shared_problem import share_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 129, 500, 1023, 3000]
# Pool, group, head size, block size, dtype, warps of a program
SHAPES = [
    ("e4m3", 1, 128, 16, torch.bfloat16, 4), ("layer", 2, 128, 16, torch.bfloat16, 1),
    ("head", 4, 128, 32, torch.bfloat16, 2), ("int8", 5, 128, 64, torch.bfloat16, 4),
    ("int8", 8, 128, 16, torch.float16, 1), ("head", 16, 128, 16, torch.bfloat16, 2),
    ("e4m3", 4, 64, 16, torch.float16, 2), ("int8", 7, 64, 32, torch.bfloat16, 4),
    ("int8", 16, 64, 64, torch.bfloat16, 1), ("layer", 4, 256, 16, torch.bfloat16, 4),
    ("int8", 8, 256, 64, torch.bfloat16, 4),
]  # fmt: skip


class Problem(NamedTuple):
    q: torch.Tensor
    pool: tuple[torch.Tensor, torch.Tensor]
    scales: KVScales
    metadata: AttentionMetadata
    exact: tuple[torch.Tensor, torch.Tensor]  # what the pool stands for


def _problem(lengths, *, query_lens=None, pool="e4m3", group=2, num_kv_heads=2, head_dim=128, block_size=16,
             dtype=torch.bfloat16, seed=None, masked=float("nan"), q_factor=1.0, v_factor=1.0, **seen):  # fmt: skip
    query_lens = query_lens or [1] * len(lengths)
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=[n - size for n, size in zip(lengths, query_lens, strict=True)],
        num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype, device="cuda", seed=random.randrange(1 << 30) if seed is None else seed, masked=masked, **seen,
    )  # fmt: skip
    # Strides that are multiples of 16 compile a kernel of their own
    table = metadata.block_table
    metadata.block_table = pad(table, (0, -table.shape[1] % 16), value=int(table[0, -1]))
    numbers, scales, exact = _as_pool(k_cache, v_cache * v_factor, pool)
    return Problem(q * q_factor, numbers, scales, metadata, exact)


def _as_pool(k_cache, v_cache, pool):
    if pool == "int8":
        (keys, k_scales, k_exact), (values, v_scales, v_exact) = as_int8(k_cache), as_int8(v_cache)
        return (keys, values), KVScales(k=k_scales, v=v_scales), (k_exact, v_exact)
    k_head, v_head = (torch.rand(k_cache.shape[2], device="cuda") + 0.5 for _ in range(2))
    scales = {"e4m3": UNSCALED, "layer": KVScales(k=0.5, v=0.03), "head": KVScales(k=k_head, v=v_head)}[pool]
    (keys, k_exact), (values, v_exact) = as_fp8(k_cache, scales.k), as_fp8(v_cache, scales.v)
    return (keys, values), scales, (k_exact, v_exact)


def _scratch(problem):
    from kernels.attention.gluon_decode import WARPS_PER_SM
    from kernels.attention.triton_splits import DecodeScratch

    num_heads, num_kv_heads = problem.q.shape[1], problem.pool[0].shape[2]
    return DecodeScratch.allocate(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=problem.q.shape[2], device=problem.q.device,
        warps_per_sm=WARPS_PER_SM,
    )  # fmt: skip


def _config(head_dim, num_warps):
    from kernels.attention.gluon_decode import decode8_config

    num_pairs = {4: 1, 2: 5 * 132, 1: 10**6}[num_warps]
    config = decode8_config(head_dim, num_pairs=num_pairs, num_sms=132)
    assert config.num_warps == num_warps
    return config


def _attend(problem, out, scratch, *, is_ragged, is_cut, q=None, **options):
    from kernels.attention.gluon_decode import decode8_attention
    from kernels.attention.triton_cut_rows import cut_rows

    metadata, num_kv_heads = problem.metadata, problem.pool[0].shape[2]
    starts = metadata.query_start_loc if is_ragged else None
    pieces = None
    if is_cut:
        num_pieces = scratch.num_pieces(num_rows=metadata.seq_lens.shape[0], num_kv_heads=num_kv_heads)
        pieces = cut_rows(metadata.seq_lens, num_pieces=num_pieces, query_start_loc=starts)
    q = problem.q if q is None else q
    decode8_attention(
        q, *problem.pool, metadata.block_table, metadata.seq_lens, out, scratch, scale=q.shape[2] ** -0.5,
        kv_scales=problem.scales, query_start_loc=starts, max_seq_len=metadata.max_seq_len, pieces=pieces, pdl=True,
        **options,
    )  # fmt: skip


def _expected(problem, **options):
    return reference(problem.q, *problem.exact, problem.metadata, scale=problem.q.shape[2] ** -0.5, **options)


def _error(lengths, *, query_lens=None, is_cut=True, num_warps=4, options=None, **shape):
    """Relative error of the rows of one token. Others must be left alone, and counters and bits be as before."""
    options = dict(options or {})
    seen = {name: options[name] for name in ("sliding_window", "chunk") if name in options}
    problem = _problem(lengths, query_lens=query_lens, **shape, **seen)
    if options.get("sinks"):
        options["sinks"] = torch.randn(problem.q.shape[1], device="cuda").to(problem.q.dtype)
    out, again = torch.full_like(problem.q, float("nan")), torch.full_like(problem.q, float("nan"))
    scratch, config = _scratch(problem), _config(problem.q.shape[2], num_warps)
    scratch.partial.fill_(float("nan"))
    for result in (out, again):
        _attend(
            problem, result, scratch, is_ragged=query_lens is not None, is_cut=is_cut and not seen, config=config,
            **options,
        )  # fmt: skip
        assert not scratch.arrivals.any()
    sizes = torch.tensor(query_lens or [1] * len(lengths), device="cuda")
    is_single = (sizes == 1).repeat_interleave(sizes)
    assert out[~is_single].isnan().all()
    assert torch.equal(out[is_single], again[is_single])
    return relative_error(out[is_single], _expected(problem, **options)[is_single])


@pytest.mark.parametrize(("pool", "group", "head_dim", "block_size", "dtype", "num_warps"), SHAPES)
def test_rows_of_every_length_in_pieces(pool, group, head_dim, block_size, dtype, num_warps):
    shape = {"pool": pool, "group": group, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    assert _error(LENGTHS, num_warps=num_warps, **shape) < TOLERANCE[dtype]
    for lengths in ([5000, 3], [70] * 40):
        assert _error(lengths, num_warps=num_warps, **shape) < TOLERANCE[dtype]


@pytest.mark.parametrize(("pool", "group"), [("e4m3", 4), ("int8", 2)])
@pytest.mark.parametrize("lengths", [[20_000], [5000, 3], LENGTHS, [200] * 200], ids=["long", "two", "all", "many"])
def test_equal_splits_of_rows_that_are_not_cut(lengths, pool, group):
    assert _error(lengths, is_cut=False, pool=pool, group=group) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("pool", "options"), [
    ("e4m3", {"sliding_window": 7}), ("e4m3", {"sliding_window": 100}), ("e4m3", {"sliding_window": 1000}),
    ("int8", {"sliding_window": 130, "sinks": True}), ("int8", {"sliding_window": 1000, "sinks": True}),
    ("e4m3", {"chunk": 64}), ("e4m3", {"chunk": 512}), ("int8", {"chunk": 512, "softcap": 2.0}),
    ("e4m3", {"softcap": 20.0, "sinks": True}), ("int8", {"sinks": True}),
])  # fmt: skip
def test_windows_chunks_softcaps_and_sinks(pool, options):
    for lengths in (LENGTHS, [1200] * 30):
        assert _error(lengths, pool=pool, options=options) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("is_cut", [True, False])
def test_only_rows_of_one_token_are_written(is_cut):
    query_lens = [5, 1, 1, 0, 1, 70, 1, 1, 2, 1, 1, 300]
    lengths = [5, 1, 0, 40, 16, 700, 65, 500, 3000, 3000, 129, 300]
    assert _error(lengths, query_lens=query_lens, is_cut=is_cut) < TOLERANCE[torch.bfloat16]
    assert _error([9, 20, 30], query_lens=[1, 20, 1], is_cut=is_cut) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("masked", [float("inf"), -float("inf")])
@pytest.mark.parametrize(("pool", "options"), [
    ("layer", {}), ("int8", {}), ("e4m3", {"sliding_window": 100}), ("int8", {"sliding_window": 130, "sinks": True}),
])  # fmt: skip
def test_what_no_query_sees_never_counts(pool, options, masked):
    """The other tests have NaN there."""
    assert _error(LENGTHS, pool=pool, options=options, masked=masked) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("q_factor", [1e5, 1e-3])
def test_queries_that_float16_does_not_hold(q_factor):
    assert _error(LENGTHS, seed=5, num_warps=1, q_factor=q_factor) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("v_factor", [1e-3, 6e3])
def test_int8_values_of_any_size_keep_half_precision(v_factor):
    shape = {"pool": "int8", "group": 8, "dtype": torch.float16, "num_warps": 1}
    assert _error(LENGTHS, v_factor=v_factor, **shape) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("pool", ["e4m3", "int8"])
def test_pools_of_more_than_2_to_the_31_words(pool):
    """Rows have the last blocks, whose offsets need 64 bits. Two pools of 8.6 GB."""
    problem = _problem(LENGTHS, pool=pool, block_size=64)
    num_blocks, num_used = 2**33 // (64 * 2 * 128) + 100, problem.pool[0].shape[0]
    caches, its_scales = [], []
    for cache, scales in zip(problem.pool, (problem.scales.k, problem.scales.v), strict=True):
        if pool == "int8":
            large, large_scales = empty_int8(num_blocks, 64, 2, 128, device="cuda")
            large_scales[-num_used:] = scales
            its_scales.append(large_scales)
        else:
            large = torch.full((num_blocks, 64, 2, 128), 0x7F, dtype=torch.uint8, device="cuda").view(FP8)
        large.view(torch.uint8)[-num_used:] = cache.view(torch.uint8)
        caches.append(large)
    expected = _expected(problem)
    problem.metadata.block_table += num_blocks - num_used
    problem = problem._replace(pool=tuple(caches), scales=KVScales(*its_scales) if its_scales else UNSCALED)
    out = torch.full_like(problem.q, float("nan"))
    _attend(problem, out, _scratch(problem), is_ragged=False, is_cut=True)
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


def test_padding_that_is_no_number_gets_zeros():
    problem = _problem([0, 300, 0, 17])
    problem.q[[0, 2]] = float("nan")
    out = torch.full_like(problem.q, float("nan"))
    _attend(problem, out, _scratch(problem), is_ragged=False, is_cut=True)
    assert not out[[0, 2]].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("is_ragged", [False, True])
def test_one_graph_serves_all_lengths(is_ragged):
    """Three layers that share their scratch, each begun before the one before it has ended."""
    problem = _problem([5000] * 6)
    metadata, scratch = problem.metadata, _scratch(problem)
    out = torch.empty(3, *problem.q.shape, dtype=problem.q.dtype, device="cuda")
    options = {"is_ragged": is_ragged, "is_cut": True, "config": _config(128, 4)}
    _attend(problem, out[0], scratch, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(3):
            _attend(problem, out[layer], scratch, q=problem.q.clone(), **options)
    for lengths in ([5000, 16, 17, 0, 1, 640], [1, 1, 1, 1, 1, 5000], [140, 700, 2000, 64, 1, 63], [5000] * 6):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out[0], _expected(problem)) < TOLERANCE[torch.bfloat16]
        assert torch.equal(out[1:], out[:1].expand(2, -1, -1, -1))
        assert not scratch.arrivals.any()


def test_the_same_inputs_give_the_same_bits():
    problem = _problem([4000, 100, 900, 2000], num_kv_heads=8)
    scratch, options = _scratch(problem), {"is_ragged": False, "is_cut": True, "config": _config(128, 4)}
    first, again = torch.empty_like(problem.q), torch.empty_like(problem.q)
    _attend(problem, first, scratch, **options)
    for _ in range(50):
        _attend(problem, again, scratch, **options)
        assert torch.equal(first, again)


@pytest.fixture
def launched(monkeypatch):
    """The config of each launch of this kernel by the backend."""
    from kernels.attention import gluon_decode

    configs = []
    choose = gluon_decode.decode8_config
    monkeypatch.setattr(
        gluon_decode, "decode8_config", lambda *args, **sizes: configs.append(choose(*args, **sizes)) or configs[-1]
    )
    return configs


def _forward(problem):
    from kernels.attention.triton_backend import TritonAttention

    torch.full_like(problem.q, float("nan"))  # the memory that the output is likely to get
    q, metadata = problem.q, problem.metadata
    return TritonAttention().forward(q, *problem.pool, metadata, scale=q.shape[2] ** -0.5, kv_scales=problem.scales)


@pytest.mark.parametrize(("num_rows", "num_warps"), [(40, 4), (80, 2), (140, 1)])
def test_the_backend_uses_it_with_as_many_warps_as_rows_leave(num_rows, num_warps, launched):
    draw = random.Random(num_rows)
    problem = _problem([draw.choice([1, 100, 550, 900]) for _ in range(num_rows)], num_kv_heads=8)
    assert relative_error(_forward(problem), _expected(problem)) < TOLERANCE[torch.bfloat16]
    assert [config.num_warps for config in launched] == [num_warps]


def test_the_backend_has_other_kernels_for_rows_that_share_keys_and_for_pools_of_16_bits(launched):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1] * 6, context_lens=[700, 300, 260, 500, 9, 256], num_heads=8, num_kv_heads=2, head_dim=128,
        block_size=16, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    problem = Problem(q, (k_cache, v_cache), UNSCALED, metadata, (k_cache, v_cache))
    assert relative_error(_forward(problem), _expected(problem)) < TOLERANCE[torch.bfloat16]
    metadata = share_blocks(k_cache, v_cache, metadata, [([0, 1, 3], 256)])
    numbers, scales, exact = _as_pool(k_cache, v_cache, "layer")
    problem = Problem(q, numbers, scales, metadata, exact)
    assert relative_error(_forward(problem), _expected(problem)) < TOLERANCE[torch.bfloat16]
    assert not launched
