"""TritonAttention on the device against float64: ragged mixes, groups, head dims, windows, caps, blocks, graphs."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.attention.base import AttentionSpec
from tests.unit.kernels.triton_cases.ragged import make_problem, reference, relative_error

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def _backend():
    from kernels.attention.triton_backend import TritonAttention

    return TritonAttention()


def _error(query_lens, context_lens, *, group=2, num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16,
           is_prepared=False, masked=float("nan"), least_blocks=0, **options):  # fmt: skip
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda", seed=random.randrange(1 << 30),
        masked=masked, sliding_window=options.get("sliding_window"), least_blocks=least_blocks,
    )  # fmt: skip
    scale = head_dim**-0.5
    # The allocator hands this memory, still NaN, to the backend's output
    torch.full_like(q, float("nan"))
    backend = _backend()
    if is_prepared:
        backend.forward(q, k_cache, v_cache, metadata, scale=scale)  # tells it the number of heads
        backend.prepare(metadata)
        torch.full_like(q, float("nan"))
    out = backend.forward(q, k_cache, v_cache, metadata, scale=scale, **options)
    return relative_error(out, reference(q, k_cache, v_cache, metadata, scale=scale, **options))


def _ragged(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    decodes = draw.randint(1, 20)
    query_lens = [1] * decodes + [draw.randint(2, 300) for _ in range(draw.randint(1, 5))] + [1]
    return query_lens, [draw.choice([0, 5, 100, 700, 2500]) for _ in query_lens]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_group_size(group):
    assert _error(*_ragged(group), group=group) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_and_dtype(head_dim, dtype):
    assert _error(*_ragged(head_dim), head_dim=head_dim, dtype=dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_every_block_size(block_size):
    assert _error(*_ragged(block_size), block_size=block_size) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 7}, {"sliding_window": 128},
                                     {"sliding_window": 1000}, {"softcap": 20.0},
                                     {"sliding_window": 333, "softcap": 5.0}])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_windows_and_softcap(options, head_dim):
    assert _error(*_ragged(11), head_dim=head_dim, **options) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("masked", [float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 20.0}])
def test_what_no_query_sees_never_counts(options, masked):
    """The other tests have NaN there."""
    assert _error(*_ragged(13), masked=masked, **options) < TOLERANCE[torch.bfloat16]
    assert _error([1] * 40, [50 * i for i in range(40)], masked=masked, **options) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}])
def test_pools_of_more_than_2_to_the_31_elements(options, is_prepared):
    """Rows have the last blocks, whose offsets need 64 bits. Two pools of 4.3 GB."""
    num_blocks = 2**31 // (64 * 2 * 128) + 100
    error = _error(*_ragged(14), block_size=64, least_blocks=num_blocks, is_prepared=is_prepared, **options)
    assert error < TOLERANCE[torch.bfloat16]
    assert _error([1] * 9, [700] * 9, block_size=64, least_blocks=num_blocks, **options) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [1, 7, 100])
def test_windows_in_float32(window):
    assert _error(*_ragged(12), head_dim=64, dtype=torch.float32, sliding_window=window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_decode_batches_of_every_size(rows):
    draw = random.Random(rows)
    assert _error([1] * rows, [draw.randint(0, 2000) for _ in range(rows)]) < TOLERANCE[torch.bfloat16]


def test_long_rows_among_short_ones():
    assert _error([1, 1, 1, 700], [30_000, 0, 17, 9_000], num_kv_heads=1, group=4) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 8), (2, 3), (8, 4)])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_equal_length_give_the_same(seed, num_kv_heads, group):
    draw = random.Random(seed)
    query_lens, context_lens = _ragged(seed)
    context_lens[draw.randrange(len(context_lens))] = draw.randint(10_000, 40_000)
    shape = {"num_kv_heads": num_kv_heads, "group": group, "is_prepared": True}
    assert _error(query_lens, context_lens, **shape) < TOLERANCE[torch.bfloat16]
    rows = draw.choice([2, 5, 33, 70, 257])
    lengths = [draw.choice([0, 63, 64, 700, 3000]) for _ in range(rows - 1)]
    assert _error([1] * rows, [*lengths, 30_000], **shape) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("block_size", [16, 64])
def test_prompts_long_enough_for_the_large_tiles(block_size):
    error = _error([1, 1, 1, 2500, 701], [9, 100, 2000, 0, 1500], num_kv_heads=8, block_size=block_size)
    assert error < TOLERANCE[torch.bfloat16]
    assert _error([2500], [700], num_kv_heads=8, block_size=block_size, sliding_window=999) < TOLERANCE[torch.bfloat16]


def test_one_graph_serves_all_lengths():
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 16, "dtype": torch.bfloat16}
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1] * 4, context_lens=[3000] * 4, device="cuda", **shape
    )  # fmt: skip
    backend = _backend()
    backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    metadata.decode_pieces = None  # which the first forward cut, of one step's lengths
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    for lengths in ([1, 16, 17, 3001], [2000, 64, 65, 640], [3001, 3001, 1, 1]):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(q, k_cache, v_cache, metadata, scale=0.1)
        assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


def test_one_graph_cuts_all_lengths():
    """With rows of one token anywhere, and of none, as in the graphs of steps with prompts."""
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[40, 1, 1, 1, 0, 1], context_lens=[100, *[5000] * 5], num_heads=8, num_kv_heads=2, head_dim=128,
        block_size=16, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    metadata.num_decodes = None
    backend = _backend()
    backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.prepare(metadata)
        queries = q.clone()  # a kernel between, as in a model
        out = backend.forward(queries, k_cache, v_cache, metadata, scale=0.1)
    assert metadata.decode_pieces is not None
    for lengths in ([140, 5001, 16, 17, 9, 1], [41, 1, 1, 1, 1, 5001], [140, 700, 2000, 64, 1, 640]):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(q, k_cache, v_cache, metadata, scale=0.1)
        assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_same_inputs_give_the_same_bits(is_prepared):
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1] * 3, context_lens=[4000, 100, 900], num_heads=8, num_kv_heads=2, head_dim=128,
        block_size=16, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    backend = _backend()
    first = backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    if is_prepared:
        backend.prepare(metadata)
        q = q.clone()
        first = backend.forward(q, k_cache, v_cache, metadata, scale=0.1)
    for _ in range(50):
        assert torch.equal(backend.forward(q, k_cache, v_cache, metadata, scale=0.1), first)


def test_a_cuda_model_of_the_usual_shape_is_not_refused():
    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), block_size=16)
    assert _backend().refuse(spec) is None
