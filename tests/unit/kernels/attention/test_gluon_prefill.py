"""When prefill runs the kernel for Hopper, and with which tiles. The kernel itself needs the device: tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.attention import triton_backend
from kernels.attention.triton_backend import TritonAttention
from kernels.elementwise.reference import FP8
from tests.unit.kernels.triton_cases.ragged import make_problem

gluon_prefill = pytest.importorskip("kernels.attention.gluon_prefill", reason="needs triton 3.6", exc_type=ImportError)


def test_tickets_that_are_not_zero_stop_a_debug_run(monkeypatch):
    q, k_cache, v_cache, metadata = _problem()
    launched = []
    monkeypatch.setattr(gluon_prefill, "hopper_config", lambda **sizes: launched.append(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))
    places = (metadata.block_table, metadata.query_start_loc, metadata.seq_lens)

    def launch(tickets, *, debug):
        monkeypatch.setattr(gluon_prefill.knobs.runtime, "debug", debug)
        gluon_prefill.hopper_prefill_attention(
            q, k_cache, v_cache, *places, torch.empty_like(q), tickets, scale=1.0, max_seq_len=16
        )

    for ticket in ([0, 1], [1, 0]):
        with pytest.raises(RuntimeError, match="tickets were not zero before the launch"):
            launch(torch.tensor(ticket, dtype=torch.int32), debug=True)
        assert not launched
    for tickets, debug in ((gluon_prefill.new_tickets(torch.device("cpu")), True), (torch.ones(2), False)):
        with pytest.raises(AttributeError):  # there is no config, and no device
            launch(tickets, debug=debug)
        assert launched.pop()


def _problem(*, head_dim=128, dtype=torch.bfloat16, block_size=16, **shape):
    return make_problem(
        query_lens=[1, 9], context_lens=[4, 0], num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=block_size,
        dtype=dtype, device="cpu", **shape,
    )  # fmt: skip


def _kernel_chosen(monkeypatch, *, has_hopper=True, options=None, **kind):
    """Which prefill kernel the backend calls; nothing is launched."""
    called = []
    monkeypatch.setattr(triton_backend, "decode_attention", lambda *args, **options: None)
    for name in ("prefill_attention", "hopper_prefill_attention"):
        monkeypatch.setattr(triton_backend, name, lambda *args, name=name, **options: called.append(name))
    backend = TritonAttention()
    monkeypatch.setattr(backend, "_scratch_for", lambda *tensors: SimpleNamespace(num_pieces=lambda **rows: 1))
    monkeypatch.setattr(backend, "_look_at", lambda *tensors: None)
    backend._tickets = torch.zeros(2, dtype=torch.int32) if has_hopper else None
    q, k_cache, v_cache, metadata = _problem(**kind)
    backend.forward(q, k_cache, v_cache, metadata, scale=1.0, **(options or {}))
    (name,) = called
    return name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_prompts_run_the_kernel_for_hopper_where_it_fits(monkeypatch, head_dim, dtype):
    assert _kernel_chosen(monkeypatch, head_dim=head_dim, dtype=dtype) == "hopper_prefill_attention"


@pytest.mark.parametrize("kind", [
    {"options": {"sliding_window": 64}}, {"options": {"sliding_window": 1000, "softcap": 50.0}},
    {"options": {"sinks": torch.zeros(4)}}, {"options": {"chunk": 8192}}, {"padding": 8},
])  # fmt: skip
def test_layers_of_many_kinds_run_the_kernel_for_hopper(monkeypatch, kind):
    assert _kernel_chosen(monkeypatch, **kind) == "hopper_prefill_attention"


@pytest.mark.parametrize("other", [
    {"has_hopper": False}, {"head_dim": 80}, {"head_dim": 192}, {"dtype": torch.float32},
    {"value_dim": 64}, {"options": {"sliding_window": 63}}, {"options": {"chunk": 100}}, {"padding": 4},
    {"options": {"chunk": 192}, "block_size": 128},
    {"options": {"softcap": 30.0}, "dtype": torch.float16},
])  # fmt: skip
def test_everything_else_runs_the_triton_kernel(monkeypatch, other):
    assert _kernel_chosen(monkeypatch, **other) == "prefill_attention"


def test_heads_that_are_not_dense_in_the_cache_run_the_triton_kernel():
    q, k_cache, _, _ = _problem()
    assert gluon_prefill.takes(q, k_cache, k_cache)
    spread = k_cache.repeat(1, 1, 2, 1)[:, :, ::2]
    assert not gluon_prefill.takes(q, spread, spread)


def test_an_e4m3_pool_is_taken_with_heads_whose_tiles_fit_beside_the_loading_warpgroup():
    for head_dim, is_taken in ((64, True), (128, True), (256, False)):
        q, k_cache, _, _ = _problem(head_dim=head_dim)
        assert gluon_prefill.takes(q, k_cache.to(FP8), k_cache.to(FP8)) == is_taken
    q, k_cache, _, _ = _problem()
    assert not gluon_prefill.takes(q, k_cache.to(FP8), k_cache.to(FP8)[:, ::2]), "they lie differently"
    assert not gluon_prefill.takes(q, k_cache.to(torch.int8), k_cache.to(torch.int8))


@pytest.mark.parametrize(("total_rows", "max_seq_len", "consumers", "block_n"), [
    (132 * 128, 512, 1, 64), (132 * 90, 40_000, 1, 64), (132 * 90 + 1, 40_000, 2, 128),
    (132 * 128 + 1, 1024, 2, 64), (10**6, 1025, 2, 128),
])  # fmt: skip
def test_few_rows_take_small_tiles_and_short_ones_few_keys(total_rows, max_seq_len, consumers, block_n):
    config = gluon_prefill.hopper_config(head_dim=128, total_rows=total_rows, max_seq_len=max_seq_len, num_sms=132)
    assert (config.consumers, config.block_n) == (consumers, block_n)
    large = gluon_prefill.hopper_config(head_dim=256, total_rows=total_rows, max_seq_len=max_seq_len, num_sms=132)
    assert (large.consumers, large.block_n) == (1 if total_rows <= 132 * 90 else 2, 64)
