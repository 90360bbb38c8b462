"""The prefill kernel for Hopper against float64: ragged mixes, groups, head dims, blocks, padding, graphs."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.elementwise.reference import KVScales
from tests.unit.kernels.triton_cases.ragged import as_fp8, make_problem, reference, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
# Of the tile shapes: one warpgroup, short rows, long rows
SHAPES = ["one", "short", "long"]


def _config(shape, head_dim=128):
    from kernels.attention.gluon_prefill import hopper_config

    rows, length = {"one": (1, 1), "short": (10**6, 1024), "long": (10**6, 10**6)}[shape]
    config = hopper_config(head_dim=head_dim, total_rows=rows, max_seq_len=length, num_sms=132)
    assert (
        head_dim > 128
        or (config.consumers, config.block_n) == {"one": (1, 64), "short": (2, 64), "long": (2, 128)}[shape]
    )
    return config


def _attend(q, k_cache, v_cache, metadata, out, *, tickets=None, **options):
    from kernels.attention.gluon_prefill import hopper_prefill_attention, new_tickets

    tickets = new_tickets(q.device) if tickets is None else tickets
    hopper_prefill_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, out, tickets,
        scale=q.shape[2] ** -0.5, max_seq_len=metadata.max_seq_len, **options,
    )  # fmt: skip
    return tickets


def _problem(
    query_lens, context_lens, *, group=2, num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16, **slots
):
    return make_problem(
        query_lens=query_lens, context_lens=context_lens, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda", seed=random.randrange(1 << 30),
        **slots,
    )  # fmt: skip


def _errors(query_lens, context_lens, *, first_row=0, skips_decodes=False, shape="long", **kind):
    """Relative errors of this kernel and of the Triton one, whose tokens must be the same ones."""
    from kernels.attention.triton_prefill import prefill_attention

    q, k_cache, v_cache, metadata = _problem(query_lens, context_lens, **kind)
    out, other = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    options = {"first_row": first_row, "skips_decodes": skips_decodes}
    tickets = _attend(q, k_cache, v_cache, metadata, out, config=_config(shape), **options)
    prefill_attention(
        q, k_cache, v_cache, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, other,
        scale=q.shape[2] ** -0.5, max_query_len=max(query_lens), **options,
    )  # fmt: skip
    written = out.isfinite().all(-1).all(-1)
    assert not tickets.any()
    assert torch.equal(written, other.isfinite().all(-1).all(-1))
    assert bool(out[~written].isnan().all())
    expected = reference(q, k_cache, v_cache, metadata, scale=q.shape[2] ** -0.5)[written]
    return relative_error(out[written], expected), relative_error(other[written], expected)


def _ragged(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    query_lens = [1] * draw.randint(1, 9) + [draw.randint(2, 500) for _ in range(draw.randint(1, 6))] + [0, 1, 129, 1]
    return query_lens, [draw.choice([0, 5, 100, 700, 2500]) for _ in query_lens]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("group", "head_dim", "block_size", "dtype"), [
    (1, 128, 16, torch.bfloat16), (2, 128, 16, torch.bfloat16), (4, 64, 32, torch.bfloat16),
    (7, 128, 64, torch.bfloat16), (8, 64, 16, torch.float16), (6, 128, 128, torch.float16),
])  # fmt: skip
def test_errs_no_more_than_the_triton_kernel(group, head_dim, block_size, dtype, shape):
    error, other = _errors(
        *_ragged(group), skips_decodes=True, shape=shape, group=group, head_dim=head_dim, block_size=block_size,
        dtype=dtype,
    )  # fmt: skip
    assert error <= other * 1.02


@pytest.mark.parametrize("config", [(1, 64, 2, 2), (2, 64, 4, 1), (2, 128, 2, 1)], ids=str)
@pytest.mark.parametrize(("group", "head_dim", "block_size", "dtype", "options"), [
    (4, 128, 16, torch.bfloat16, {}), (2, 128, 64, torch.bfloat16, {"sinks": True, "softcap": 20.0}),
    (7, 64, 128, torch.float16, {"sinks": True}), (5, 128, 32, torch.bfloat16, {"sliding_window": 100}),
    (8, 64, 16, torch.bfloat16, {"chunk": 512}),
])  # fmt: skip
@pytest.mark.parametrize("has_head_scales", [False, True])
def test_over_an_e4m3_pool_it_errs_no_more_than_the_triton_kernel(
    group, head_dim, block_size, dtype, options, has_head_scales, config
):
    from kernels.attention.gluon_prefill import HopperConfig
    from kernels.attention.triton_prefill import prefill_attention

    query_lens, context_lens = _ragged(group)
    seen = {name: options[name] for name in ("sliding_window", "chunk") if name in options}
    q, *caches, metadata = _problem(
        query_lens, context_lens, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, **seen
    )
    scales = [torch.rand(2, device="cuda") * 0.05 + 0.01 for _ in caches] if has_head_scales else [0.02, 0.03]
    (keys, k_exact), (values, v_exact) = (as_fp8(cache, scale) for cache, scale in zip(caches, scales, strict=True))
    options = {**options, "kv_scales": KVScales(*scales)}
    if options.get("sinks"):
        options["sinks"] = torch.randn(q.shape[1], device="cuda").to(dtype)
    out, again, other = (torch.full_like(q, float("nan")) for _ in range(3))
    for result in (out, again):
        tickets = _attend(
            q, keys, values, metadata, result, config=HopperConfig(*config), skips_decodes=True, **options
        )
        assert not tickets.any()
    prefill_attention(
        q, keys, values, metadata.block_table, metadata.query_start_loc, metadata.seq_lens, other,
        scale=q.shape[2] ** -0.5, max_query_len=max(query_lens), skips_decodes=True, **options,
    )  # fmt: skip
    del options["kv_scales"]
    written = other.isfinite().all(-1).all(-1)
    expected = reference(q, k_exact, v_exact, metadata, scale=q.shape[2] ** -0.5, **options)[written]
    assert out[~written].isnan().all()
    assert torch.equal(out[written], again[written])
    slack = 1.1 if "softcap" in options else 1.05  # the tanh of the hardware has about 11 bits
    assert relative_error(out[written], expected) <= relative_error(other[written], expected) * slack


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_before_the_first_are_not_touched(shape):
    error, other = _errors([1, 1, 700, 1, 3], [9, 100, 40, 0, 2000], first_row=2, shape=shape)
    assert error <= other * 1.02


@pytest.mark.parametrize("shape", SHAPES)
def test_more_rows_than_one_search_step_holds(shape):
    draw = random.Random(7)
    query_lens = [draw.choice([0, 1, 2, 17, 64, 65]) for _ in range(300)]
    error, other = _errors(query_lens, [draw.randint(0, 90) for _ in query_lens], skips_decodes=True, shape=shape)
    assert error <= other * 1.02


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [float("inf"), -float("inf")])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_what_no_query_sees_never_counts(block_size, masked, shape):
    """The other tests have NaN there."""
    error, other = _errors(*_ragged(15), skips_decodes=True, shape=shape, block_size=block_size, masked=masked)
    assert error <= other * 1.02


@pytest.mark.parametrize("shape", SHAPES)
def test_pools_of_more_than_2_to_the_31_elements(shape):
    num_blocks = 2**31 // (64 * 2 * 128) + 100
    error, other = _errors(*_ragged(16), skips_decodes=True, shape=shape, block_size=64, least_blocks=num_blocks)
    assert error <= other * 1.02


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_that_is_no_number_gets_zeros_and_spoils_no_other_row(shape):
    q, k_cache, v_cache, metadata = _problem([40, 17, 200], [0, 9, 20])
    expected = torch.full_like(q, float("nan"))
    metadata.seq_lens[0] = 0
    _attend(q, k_cache, v_cache, metadata, expected, config=_config(shape))
    q[:40] = float("nan")
    k_cache[metadata.block_table[0].long()], v_cache[metadata.block_table[0].long()] = float("nan"), float("nan")
    out = torch.full_like(q, float("nan"))
    _attend(q, k_cache, v_cache, metadata, out, config=_config(shape))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_padding", [1, 40, 300])
def test_the_tokens_of_a_padding_row_get_zeros(num_padding, shape):
    q, k_cache, v_cache, metadata = _problem([num_padding, 17, 200], [0, 9, 20])
    metadata.seq_lens[0] = 0
    out = torch.full_like(q, float("nan"))
    _attend(q, k_cache, v_cache, metadata, out, config=_config(shape))
    assert not out[:num_padding].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_one_graph_serves_all_lengths(shape):
    q, k_cache, v_cache, metadata = _problem([512, 512, 512], [2000, 2000, 2000])
    out = torch.empty_like(q)
    tickets = _attend(q, k_cache, v_cache, metadata, out, config=_config(shape), pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            _attend(q, k_cache, v_cache, metadata, out, tickets=tickets, config=_config(shape), pdl=True)
    for starts, seq_lens in (([0, 1, 1000, 1536], [5, 1700, 2512]), ([0, 1536, 1536, 1536], [1536, 0, 9])):
        metadata.query_start_loc.copy_(torch.tensor(starts))
        metadata.seq_lens.copy_(torch.tensor(seq_lens))
        out.fill_(float("nan"))
        graph.replay()
        expected = reference(q, k_cache, v_cache, metadata, scale=q.shape[2] ** -0.5)
        assert relative_error(out, expected) < 6e-3


def test_the_same_inputs_give_the_same_bits():
    q, k_cache, v_cache, metadata = _problem([900, 77], [300, 1000], num_kv_heads=8)
    first, again = torch.empty_like(q), torch.empty_like(q)
    _attend(q, k_cache, v_cache, metadata, first)
    for _ in range(30):
        _attend(q, k_cache, v_cache, metadata, again)
        assert torch.equal(first, again)


def test_the_backend_uses_it_and_its_output_is_right():
    from kernels.attention.triton_backend import TritonAttention

    q, k_cache, v_cache, metadata = _problem([1, 1, 2500, 701], [9, 100, 0, 1500], num_kv_heads=8)
    backend = TritonAttention()
    out = backend.forward(q, k_cache, v_cache, metadata, scale=q.shape[2] ** -0.5)
    expected = reference(q, k_cache, v_cache, metadata, scale=q.shape[2] ** -0.5)
    assert relative_error(out, expected) < 6e-3
    assert backend._tickets is not None
