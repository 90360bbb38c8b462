"""Attention for layers of many kinds on the device, against float64: sinks, windows, chunks, head sizes, views."""

from __future__ import annotations

import random

import pytest
import torch

from tests.unit.kernels.triton_cases.ragged import make_problem, reference, relative_error

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
SEEN = [
    {}, {"sliding_window": 1}, {"sliding_window": 64}, {"sliding_window": 77}, {"sliding_window": 128},
    {"sliding_window": 1000}, {"chunk": 100}, {"chunk": 512},
]  # fmt: skip
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def _ragged(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    query_lens = [1] * draw.randint(1, 20) + [draw.randint(2, 300) for _ in range(draw.randint(1, 5))] + [1]
    return query_lens, [draw.choice([0, 5, 100, 700, 2500]) for _ in query_lens]


def _problem(query_lens, context_lens, *, group=2, num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16,
             **options):  # fmt: skip
    return make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda", seed=random.randrange(1 << 30),
        **options,
    )  # fmt: skip


def _sinks(q):
    return torch.randn(q.shape[1], device="cuda") * 3


def _error(query_lens, context_lens, *, softcap=0.0, has_sinks=False, is_mixed=False, shape=None, **seen):
    """Of the backend, whose prefill is the kernel for Hopper where that takes the problem."""
    from kernels.attention.triton_backend import TritonAttention

    q, k_cache, v_cache, metadata = _problem(query_lens, context_lens, **(shape or {}), **seen)
    options = {"scale": q.shape[2] ** -0.5, "softcap": softcap, "sinks": _sinks(q) if has_sinks else None} | seen
    if is_mixed:
        metadata.num_decodes = None
    torch.full((*q.shape[:2], v_cache.shape[3]), float("nan"), dtype=q.dtype, device="cuda")  # memory of the output
    out = TritonAttention().forward(q, k_cache, v_cache, metadata, **options)
    return relative_error(out, reference(q, k_cache, v_cache, metadata, **options))


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_sinks_with_every_reach(head_dim, seen, is_mixed):
    error = _error(*_ragged(head_dim), has_sinks=True, is_mixed=is_mixed, shape={"head_dim": head_dim}, **seen)
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256, 512])
def test_head_sizes_and_dtypes(head_dim, dtype):
    shape = {"head_dim": head_dim, "dtype": dtype, "num_kv_heads": 4, "group": 4}
    assert _error(*_ragged(head_dim), shape=shape) < TOLERANCE[dtype]
    assert _error([1, 1, 2500, 701], [9, 3000, 0, 1500], shape=shape, sliding_window=1024) < TOLERANCE[dtype]


@pytest.mark.parametrize("softcap", [5.0, 50.0])
@pytest.mark.parametrize("seen", [{}, {"sliding_window": 1000}])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_soft_caps(head_dim, seen, softcap):
    shape = {"head_dim": head_dim, "num_kv_heads": 4}
    assert _error(*_ragged(21), softcap=softcap, shape=shape, **seen) < TOLERANCE[torch.bfloat16]
    error = _error([1, 1, 2500, 701], [9, 3000, 0, 1500], softcap=softcap, shape=shape, **seen)
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("masked", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("seen", SEEN[1:])
def test_stale_columns_behind_a_window_never_count(seen, block_size, masked):
    shape = {"block_size": block_size, "masked": masked}
    assert _error(*_ragged(13), shape=shape, **seen) < TOLERANCE[torch.bfloat16]
    assert _error([1] * 40, [50 * i for i in range(40)], shape=shape, **seen) < TOLERANCE[torch.bfloat16]
    assert _error([1, 900, 333], [3000, 1000, 17], shape=shape, **seen) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (576, 512), (320, 256), (128, 64)])
@pytest.mark.parametrize("options", [{}, {"has_sinks": True}, {"sliding_window": 100}])
def test_values_of_another_size_than_keys(head_dim, value_dim, options):
    shape = {"head_dim": head_dim, "value_dim": value_dim, "num_kv_heads": 1, "group": 8}
    assert _error(*_ragged(14), shape=shape, **options) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("seen", [{}, {"sliding_window": 100}])
@pytest.mark.parametrize("shape", [{"padding": 72}, {"padding": 72, "head_dim": 256}, {"padding": 4},
                                   {"padding": 40, "value_dim": 64}])  # fmt: skip
def test_caches_may_be_views_with_gaps_between_blocks(shape, seen):
    assert _error(*_ragged(15), shape=shape, **seen) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("seen", [{}, {"sliding_window": 100}])
def test_padded_pools_of_more_than_2_to_the_31_elements(seen):
    """Rows have the last blocks, whose offsets need 64 bits."""
    stride = 64 * 2 * 128 + 64
    shape = {"block_size": 64, "padding": 64, "least_blocks": 2**31 // stride + 100}
    assert _error(*_ragged(16), shape=shape, **seen) < TOLERANCE[torch.bfloat16]


@needs_hopper
@pytest.mark.parametrize("tiles", ["one", "two"])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("seen", [{}, {"sliding_window": 64}, {"sliding_window": 333}, {"chunk": 256}])
def test_the_kernel_for_hopper_errs_no_more_than_the_triton_kernel(seen, head_dim, block_size, tiles):
    from kernels.attention.gluon_prefill import hopper_config, hopper_prefill_attention, new_tickets, takes
    from kernels.attention.triton_prefill import prefill_attention

    query_lens, context_lens = [70, 3, 500, 129, 1, 0, 40], [0, 100, 1000, 333, 700, 30, 2500]
    q, k_cache, v_cache, metadata = _problem(
        query_lens, context_lens, head_dim=head_dim, block_size=block_size, group=4, **seen
    )
    assert takes(q, k_cache, v_cache, **seen)
    out, other = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    shared = (q, k_cache, v_cache, metadata.block_table, metadata.query_start_loc, metadata.seq_lens)
    options = {"scale": head_dim**-0.5, "sinks": _sinks(q)} | seen
    rows = {"one": 1, "two": 10**6}[tiles]
    config = hopper_config(head_dim=head_dim, total_rows=rows, max_seq_len=10**6, num_sms=132)
    tickets = new_tickets(q.device)
    hopper_prefill_attention(*shared, out, tickets, max_seq_len=metadata.max_seq_len, config=config, **options)
    prefill_attention(*shared, other, max_query_len=500, **options)
    assert not tickets.any()
    expected = reference(q, k_cache, v_cache, metadata, **options)
    assert relative_error(out, expected) <= relative_error(other, expected) * 1.02


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_padding_rows_with_sinks_and_windows_get_zeros(head_dim):
    from kernels.attention.triton_backend import TritonAttention

    q, k_cache, v_cache, metadata = _problem([300, 17, 200], [0, 9, 20], head_dim=head_dim)
    metadata.seq_lens[0] = 0
    for seen in ({}, {"sliding_window": 100}, {"chunk": 64}, {"sliding_window": 7}):
        out = TritonAttention().forward(q, k_cache, v_cache, metadata, scale=0.1, sinks=_sinks(q), **seen)
        assert not out[:300].any()
        assert out.isfinite().all()


def test_one_backend_serves_layers_of_many_kinds_in_one_graph():
    """As in Gemma 4: heads of 256 with a window and of 512 without, with different numbers of KV heads."""
    from kernels.attention.triton_backend import TritonAttention

    rows = ([1] * 5, [3000, 100, 9000, 0, 700])
    backend = TritonAttention()
    small = _problem(*rows, head_dim=256, num_kv_heads=4, sliding_window=512)
    large = _problem(*rows, head_dim=512, num_kv_heads=1, group=8)
    other = _problem(*rows, head_dim=128, num_kv_heads=8)
    kinds = [(small, {"sliding_window": 512}), (large, {}), (other, {})]
    for (*tensors, metadata), seen in kinds:
        backend.forward(*tensors, metadata, scale=0.1, **seen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = []
        for (*tensors, metadata), seen in kinds:
            backend.prepare(metadata)
            queries = tensors[0].clone()  # a kernel between, as in a model
            outs.append(backend.forward(queries, *tensors[1:], metadata, scale=0.1, **seen))
    assert set(large[3].decode_pieces) == {1, 8}
    for out in outs:
        out.fill_(float("nan"))
    graph.replay()
    for ((*tensors, metadata), seen), out in zip(kinds, outs, strict=True):
        assert relative_error(out, reference(*tensors, metadata, scale=0.1, **seen)) < TOLERANCE[torch.bfloat16]


def test_norm_rope_write_kv_fills_blocks_that_have_gaps_between_them():
    from kernels.ops import norm_rope_write_kv

    qkv, slots = torch.randn(5, 8 * 64, device="cuda"), torch.tensor([3, 9, 1, 30, 8], device="cuda")
    arguments = (qkv, None, None, 1e-6, torch.arange(5, device="cuda"), torch.randn(20, 64, device="cuda"))
    pools = [torch.zeros(4, 8 * 2 * 64 + 32, device="cuda") for _ in range(2)]
    views = [pool[:, :1024].unflatten(1, (8, 2, 64)) for pool in pools]
    dense = [torch.zeros(4, 8, 2, 64, device="cuda") for _ in range(2)]
    norm_rope_write_kv(*arguments, *views, slots, num_heads=4)
    norm_rope_write_kv(*arguments, *dense, slots, num_heads=4)
    for pool, view, expected in zip(pools, views, dense, strict=True):
        assert torch.equal(view, expected)
        assert not pool[:, 1024:].any()
