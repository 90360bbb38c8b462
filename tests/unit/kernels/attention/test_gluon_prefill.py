"""When prefill runs the kernel for Hopper, and with which tiles. The kernel itself needs the device: tests/gpu."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import triton_backend
from kernels.attention.triton_backend import TritonAttention
from kernels.elementwise.reference import FP8
from tests.unit.kernels.triton_cases.ragged import make_problem

gluon_prefill = pytest.importorskip("kernels.attention.gluon_prefill", reason="needs triton 3.6", exc_type=ImportError)


def _problem(*, head_dim=128, dtype=torch.bfloat16):
    return make_problem(
        query_lens=[1, 9], context_lens=[4, 0], num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=16,
        dtype=dtype, device="cpu",
    )  # fmt: skip


def _kernel_chosen(monkeypatch, *, has_hopper=True, sliding_window=None, softcap=0.0, **kind):
    """Which prefill kernel the backend calls; nothing is launched."""
    called = []
    monkeypatch.setattr(triton_backend, "decode_attention", lambda *args, **options: None)
    for name in ("prefill_attention", "hopper_prefill_attention"):
        monkeypatch.setattr(triton_backend, name, lambda *args, name=name, **options: called.append(name))
    backend = TritonAttention()
    monkeypatch.setattr(backend, "_scratch_for", lambda q, k_cache: None)
    backend._tickets = torch.zeros(2, dtype=torch.int32) if has_hopper else None
    q, k_cache, v_cache, metadata = _problem(**kind)
    backend.forward(q, k_cache, v_cache, metadata, scale=1.0, sliding_window=sliding_window, softcap=softcap)
    (name,) = called
    return name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prompts_run_the_kernel_for_hopper_where_it_fits(monkeypatch, head_dim, dtype):
    assert _kernel_chosen(monkeypatch, head_dim=head_dim, dtype=dtype) == "hopper_prefill_attention"


@pytest.mark.parametrize("other", [
    {"has_hopper": False}, {"head_dim": 80}, {"head_dim": 256}, {"dtype": torch.float32}, {"sliding_window": 100},
    {"softcap": 30.0},
])  # fmt: skip
def test_everything_else_runs_the_triton_kernel(monkeypatch, other):
    assert _kernel_chosen(monkeypatch, **other) == "prefill_attention"


def test_heads_that_are_not_dense_in_the_cache_run_the_triton_kernel():
    q, k_cache, _, _ = _problem()
    assert gluon_prefill.takes(q, k_cache, sliding_window=None, softcap=0.0)
    assert not gluon_prefill.takes(q, k_cache.repeat(1, 1, 2, 1)[:, :, ::2], sliding_window=None, softcap=0.0)


def test_an_fp8_pool_runs_the_triton_kernel():
    q, k_cache, _, _ = _problem()
    assert not gluon_prefill.takes(q, k_cache.to(FP8), sliding_window=None, softcap=0.0)


@pytest.mark.parametrize(("total_rows", "max_seq_len", "consumers", "block_n"), [
    (132 * 128, 512, 1, 64), (132 * 90, 40_000, 1, 64), (132 * 90 + 1, 40_000, 2, 128),
    (132 * 128 + 1, 1024, 2, 64), (10**6, 1025, 2, 128),
])  # fmt: skip
def test_few_rows_take_small_tiles_and_short_ones_few_keys(total_rows, max_seq_len, consumers, block_n):
    config = gluon_prefill.hopper_config(total_rows=total_rows, max_seq_len=max_seq_len, num_sms=132)
    assert (config.consumers, config.block_n) == (consumers, block_n)
