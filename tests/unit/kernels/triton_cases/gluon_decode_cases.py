"""The decode kernel for 8-bit pools, its PTX included, against float64: keys and dimensions in their order, pieces."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import gluon_attend, gluon_decode, gluon_decode_tiles
from kernels.attention.gluon_decode import Decode8Config, decode8_attention, takes
from kernels.attention.triton_cut_rows import cut_rows
from kernels.attention.triton_splits import DecodeScratch
from kernels.elementwise.reference import UNSCALED, KVScales
from tests.support.gluon_on_cpu import KernelOnCpu
from tests.unit.kernels.triton_cases.ragged import as_fp8, as_int8, make_problem, reference, relative_error

LENGTHS = [0, 1, 16, 17, 65, 300]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    modules = (gluon_decode, gluon_decode_tiles, gluon_attend)
    monkeypatch.setattr(gluon_decode, "_decode8_kernel", KernelOnCpu(gluon_decode._decode8_kernel, modules))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tiles are small
    yield
    torch.set_num_threads(threads)


def _error(lengths=LENGTHS, *, query_lens=None, pool="fp8", group=4, num_kv_heads=2, head_dim=128, block_size=16,
           dtype=torch.bfloat16, keys=32, num_warps=2, num_pieces=8, q_factor=1.0, v_factor=1.0,
           **options):  # fmt: skip
    """Relative error of the rows of one token; others must be left alone."""
    sizes = query_lens or [1] * len(lengths)
    seen = {name: options[name] for name in ("sliding_window", "chunk") if name in options}
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=sizes, context_lens=[n - size for n, size in zip(lengths, sizes, strict=True)],
        num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype, device="cpu", **seen,
    )  # fmt: skip
    q, v_cache = q * q_factor, v_cache * v_factor
    if pool == "int8":
        (k_pool, k_scales, k_exact), (v_pool, v_scales, v_exact) = as_int8(k_cache), as_int8(v_cache)
        scales = KVScales(k=k_scales, v=v_scales)
    else:
        scales = UNSCALED if pool == "fp8" else KVScales(k=0.5, v=0.03)
        if pool == "heads":
            scales = KVScales(k=torch.rand(num_kv_heads) + 0.5, v=torch.rand(num_kv_heads) + 0.5)
        (k_pool, k_exact), (v_pool, v_exact) = as_fp8(k_cache, scales.k), as_fp8(v_cache, scales.v)
    assert takes(q, k_pool, v_pool)
    scratch = DecodeScratch.allocate(
        num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=torch.device("cpu"),
        warps_per_sm=8,
    )  # fmt: skip
    scratch.partial.fill_(float("nan"))
    if options.get("sinks"):
        options["sinks"] = torch.randn(group * num_kv_heads)
    starts = metadata.query_start_loc if query_lens else None
    is_cut = bool(num_pieces) and not seen
    out, scale = torch.full_like(q, float("nan")), head_dim**-0.5
    decode8_attention(
        q, k_pool, v_pool, metadata.block_table, metadata.seq_lens, out, scratch, scale=scale, kv_scales=scales,
        query_start_loc=starts, max_seq_len=metadata.max_seq_len, config=Decode8Config(keys, num_warps, 255),
        pieces=cut_rows(metadata.seq_lens, num_pieces=num_pieces, query_start_loc=starts) if is_cut else None,
        pdl=True, **options,
    )  # fmt: skip
    assert not scratch.arrivals.any()
    is_single = (torch.tensor(sizes) == 1).repeat_interleave(torch.tensor(sizes))
    assert out[~is_single].isnan().all()
    expected = reference(q, k_exact, v_exact, metadata, scale=scale, **options)
    return relative_error(out[is_single], expected[is_single]) / TOLERANCE[dtype]


@pytest.mark.parametrize("pool", ["fp8", "int8"])
def test_rows_in_pieces_equal_the_reference(pool):
    assert _error(pool=pool) < 1


@pytest.mark.parametrize(("keys", "num_warps"), [(32, 1), (16, 2), (16, 4)])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (128, 16), (256, 8), (128, 1), (64, 7)])
@pytest.mark.parametrize("pool", ["fp8", "int8"])
def test_every_head_size_group_and_number_of_warps(pool, head_dim, group, keys, num_warps):
    shape = {"head_dim": head_dim, "group": group, "num_kv_heads": 1, "keys": keys, "num_warps": num_warps}
    assert _error([17, 200], pool=pool, **shape) < 1


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("pool", ["fp8", "layer", "heads", "int8"])
def test_every_block_size_dtype_and_kind_of_scale(pool, block_size, dtype):
    assert _error([70, 200], pool=pool, block_size=block_size, dtype=dtype) < 1


@pytest.mark.parametrize("options", [
    {}, {"sliding_window": 7}, {"sliding_window": 40, "sinks": True}, {"sliding_window": 130}, {"chunk": 64},
    {"chunk": 128, "softcap": 2.0}, {"softcap": 2.0, "sinks": True},
])  # fmt: skip
@pytest.mark.parametrize("pool", ["fp8", "int8"])
def test_splits_windows_chunks_softcaps_and_sinks(pool, options):
    for lengths in (LENGTHS, [300, 17], [700]):  # one split, some, many
        assert _error(lengths, pool=pool, num_pieces=0, **options) < 1
    assert _error(pool=pool, num_pieces=3, **options) < 1


@pytest.mark.parametrize("num_pieces", [0, 6])
def test_only_rows_of_one_token_are_written(num_pieces):
    assert _error([5, 300, 0, 40, 70, 65], query_lens=[5, 1, 1, 0, 70, 1], num_pieces=num_pieces) < 1


@pytest.mark.parametrize(("q_factor", "v_factor"), [(1e5, 1.0), (1e-3, 1.0), (1.0, 1e-6), (1.0, 6e3)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_numbers_of_any_size(dtype, q_factor, v_factor):
    if dtype == torch.float16:
        q_factor, v_factor = min(q_factor, 1e4), max(v_factor, 1e-3)
    assert _error([200, 9], pool="int8", dtype=dtype, q_factor=q_factor, v_factor=v_factor) < 1
