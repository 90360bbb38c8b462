"""When decoding runs the kernel for 8-bit pools, and how rows are cut for it. The kernel itself needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.attention import triton_backend
from kernels.attention.triton_backend import TritonAttention
from kernels.elementwise.reference import FP8, INT8
from tests.unit.kernels.triton_cases.ragged import empty_int8, make_problem

gluon_decode = pytest.importorskip("kernels.attention.gluon_decode", reason="needs triton 3.6", exc_type=ImportError)
triton_splits = pytest.importorskip("kernels.attention.triton_splits", reason="needs triton", exc_type=ImportError)
DTYPES = [torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def _caches(*, block_size=16, num_kv_heads=2, head_dim=128, value_dim=None, dtype=FP8, value_dtype=None):
    shape = (3, block_size, num_kv_heads)
    return (
        torch.zeros(*shape, head_dim).to(dtype), torch.zeros(*shape, value_dim or head_dim).to(value_dtype or dtype),
    )  # fmt: skip


def _queries(*, group=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16):
    return torch.zeros(5, group * num_kv_heads, head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", [FP8, INT8])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 16), (128, 1), (128, 5), (128, 16), (256, 1), (256, 8)])
def test_heads_of_8_bits_are_taken(head_dim, group, pool, dtype):
    for block_size in (16, 32, 256):
        caches = _caches(head_dim=head_dim, dtype=pool, block_size=block_size)
        assert gluon_decode.takes(_queries(head_dim=head_dim, group=group, dtype=dtype), *caches)
    numbers = [empty_int8(3, 16, 2, head_dim)[0] for _ in range(2)]  # with scales behind each block
    assert gluon_decode.takes(_queries(head_dim=head_dim, group=group, dtype=dtype), *numbers)


@pytest.mark.parametrize(("query", "cache"), [
    ({"dtype": torch.float32}, {}), ({}, {"dtype": torch.bfloat16}), ({}, {"value_dtype": INT8}),
    ({}, {"dtype": torch.float8_e5m2}), ({}, {"value_dim": 64}), ({"group": 17}, {}), ({"group": 32}, {}),
    *(({"head_dim": head_dim}, {"head_dim": head_dim}) for head_dim in (32, 80, 96, 192, 512)),
    ({"head_dim": 256, "group": 16}, {"head_dim": 256}), ({}, {"block_size": 8}), ({}, {"block_size": 24}),
])  # fmt: skip
def test_other_heads_groups_dtypes_and_blocks_are_not(query, cache):
    assert not gluon_decode.takes(_queries(**query), *_caches(**cache))


def test_caches_whose_heads_begin_between_words_of_16_bytes_or_lie_otherwise_are_not():
    q, (keys, values) = _queries(), _caches()
    memory = torch.zeros(keys.numel() + 16, dtype=torch.int8)
    for offset in range(0, 17, 4):
        cache = memory[offset:][: keys.numel()].view(FP8).view(keys.shape)
        is_aligned = offset % 16 == memory.data_ptr() % 16 == 0
        assert gluon_decode.takes(q, cache, cache) == is_aligned
        assert gluon_decode.takes(q, cache, values) == gluon_decode.takes(q, values, cache) == is_aligned
    for padding, fits in ((0, True), (4, False), (8, False), (16, True)):
        blocks = torch.zeros(3, 16 * 2 * 128 + padding, dtype=torch.int8).view(FP8)
        cache = blocks[:, : 16 * 2 * 128].unflatten(1, (16, 2, 128))
        assert gluon_decode.takes(q, cache, cache) == fits
        assert not padding or not gluon_decode.takes(q, cache, values)  # of other strides
    spread = torch.zeros(3, 16, 2, 256, dtype=torch.int8).view(FP8)[..., ::2]
    assert not gluon_decode.takes(q, spread, spread)
    by_head = torch.zeros(3, 2, 16, 128, dtype=torch.int8).view(FP8).transpose(1, 2)
    assert gluon_decode.takes(q, by_head, by_head)
    assert not gluon_decode.takes(q, by_head, values)


def _backend(monkeypatch, *, has_hopper):
    backend = TritonAttention()
    monkeypatch.setattr(backend, "_look_at", lambda *tensors: None)
    backend._tickets = torch.zeros(2, dtype=torch.int32) if has_hopper else None
    return backend


def _kernel_chosen(monkeypatch, *, has_hopper=True, is_shared=False, pool=FP8, options=None, **kind):
    """Which decode kernel the backend calls; nothing is launched."""
    called = []
    for module, name in ((triton_backend, "decode_attention"), (gluon_decode, "decode8_attention")):
        monkeypatch.setattr(module, name, lambda *args, name=name, **options: called.append(name))
    backend = _backend(monkeypatch, has_hopper=has_hopper)
    parts = SimpleNamespace(own_pieces=None) if is_shared else None
    monkeypatch.setattr(backend, "_attend_shared", lambda *args, **options: parts)
    monkeypatch.setattr(backend, "_scratch_for", lambda *tensors: SimpleNamespace(num_pieces=lambda **rows: 1))
    q, k_cache, v_cache, metadata = make_problem(
        query_lens=[1], context_lens=[40], block_size=16, device="cpu",
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16} | kind,
    )  # fmt: skip
    backend.forward(q, k_cache.to(pool), v_cache.to(pool), metadata, scale=1.0, **(options or {}))
    (name,) = called
    return name


@pytest.mark.parametrize("pool", [FP8, INT8])
@pytest.mark.parametrize("kind", [
    {}, {"dtype": torch.float16}, {"head_dim": 256}, {"num_heads": 32},
    {"options": {"sliding_window": 63, "sinks": torch.zeros(4)}}, {"options": {"chunk": 100, "softcap": 3.0}},
])  # fmt: skip
def test_rows_over_8_bit_pools_run_their_kernel_on_hopper(monkeypatch, pool, kind):
    assert _kernel_chosen(monkeypatch, pool=pool, **kind) == "decode8_attention"


@pytest.mark.parametrize("other", [
    {"has_hopper": False}, {"is_shared": True}, {"pool": torch.bfloat16}, {"head_dim": 80}, {"num_heads": 64},
    {"dtype": torch.float32},
])  # fmt: skip
def test_others_run_the_triton_kernel(monkeypatch, other):
    assert _kernel_chosen(monkeypatch, **other) == "decode_attention"


@pytest.mark.parametrize(("has_hopper", "head_dim", "pool", "warps"), [
    (True, 128, FP8, 8), (True, 128, INT8, 8), (True, 128, torch.bfloat16, 0), (False, 128, FP8, 0), (True, 80, FP8, 0),
])  # fmt: skip
def test_rows_are_cut_for_the_kernel_that_runs(monkeypatch, has_hopper, head_dim, pool, warps):
    backend, caches = _backend(monkeypatch, has_hopper=has_hopper), _caches(head_dim=head_dim, dtype=pool)
    assert backend._scratch_for(_queries(head_dim=head_dim), *caches).warps_per_sm == warps


@pytest.mark.parametrize(("num_rows", "num_warps", "num_pieces"), [
    (2, 4, 132 // 8), (3, 4, 2 * 132 // 8), (49, 4, 2 * 132 // 8), (50, 2, 4 * 132 // 8), (131, 2, 4 * 132 // 8),
    (132, 1, 132), (4000, 1, 132),
])  # fmt: skip
def test_warps_of_a_program_and_pieces_fill_a_device_together(num_rows, num_warps, num_pieces):
    for head_dim, keys in ((64, 32), (128, 32)):
        config = gluon_decode.decode8_config(head_dim, num_pairs=num_rows * 8, num_sms=132)
        assert (config.keys, config.num_warps) == (keys, num_warps)
    large = gluon_decode.decode8_config(256, num_pairs=num_rows * 8, num_sms=132)
    assert (large.keys, large.num_warps) == (16, 4)
    few = torch.zeros(1)
    scratch = triton_splits.DecodeScratch(few, few, few, num_sms=132, warps_per_sm=gluon_decode.WARPS_PER_SM)
    assert scratch.num_pieces(num_rows=num_rows, num_kv_heads=8) == num_pieces
