"""TorchAttention for layers of many kinds: sinks, windows, chunks, unequal head sizes and caches that are views."""

import math

import pytest
import torch

from kernels.attention.torch_ref import TorchAttention
from kernels.elementwise.reference import FP8, KVScales, write_kv
from tests.unit.kernels.attention.test_torch_attention import naive_attention
from tests.unit.kernels.triton_cases.ragged import make_problem, reference, relative_error

ROWS = {"query_lens": [1, 1, 1, 1, 7, 3, 20], "context_lens": [3, 90, 40, 0, 20, 0, 100]}
SEEN = [{}, {"sliding_window": 1}, {"sliding_window": 5}, {"sliding_window": 40}, {"chunk": 4}, {"chunk": 24}]


def problem(*, masked=math.nan, block_size=4, **options):
    return make_problem(
        **ROWS, num_heads=4, num_kv_heads=2, head_dim=16, block_size=block_size, dtype=torch.float32, device="cpu",
        masked=masked, **options,
    )  # fmt: skip


def error(case, **options):
    out = TorchAttention().forward(*case, scale=0.25, **options)
    return relative_error(out, reference(*case, scale=0.25, **options))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_sinks_join_each_softmax(seen, softcap, block_size):
    sinks = torch.tensor([0.3, -2.0, 4.0, 0.0])
    assert error(problem(block_size=block_size, **seen), sinks=sinks, softcap=softcap, **seen) < 1e-5


def test_a_sink_takes_its_share_of_the_weight():
    q, k_cache, v_cache, metadata = problem(masked=1.0)
    plain = TorchAttention().forward(q * 0, k_cache, v_cache, metadata, scale=1.0)
    sinks = torch.full((4,), math.log(3.0))  # as three more keys of weight 1, whose values are zero
    out = TorchAttention().forward(q * 0, k_cache, v_cache, metadata, scale=1.0, sinks=sinks)
    num_seen = torch.cat([torch.arange(c, c + n) + 1.0 for n, c in zip(*ROWS.values(), strict=True)])[:, None, None]
    torch.testing.assert_close(out, plain * num_seen / (num_seen + 3))


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
def test_sinks_far_from_all_logits_take_nothing_or_all(sink):
    case = problem()
    out = TorchAttention().forward(*case, scale=0.25, sinks=torch.full((4,), sink))
    expected = reference(*case, scale=0.25) if sink < 0 else torch.zeros_like(out)
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seen", SEEN[4:])
def test_a_chunk_equals_loops_over_its_keys(seen):
    case = problem(**seen)
    starts, seq_lens = case[3].query_start_loc.tolist(), case[3].seq_lens.tolist()
    out = TorchAttention().forward(*case, scale=0.25, **seen)
    for row, seq_len in enumerate(seq_lens):  # token by token, as a window that reaches to the chunk's first position
        for token in range(starts[row], starts[row + 1]):
            position = seq_len - starts[row + 1] + token
            expected = naive_attention(*case, scale=0.25, sliding_window=position % seen["chunk"] + 1)
            torch.testing.assert_close(out[token].double(), expected[token], atol=1e-5, rtol=0)


@pytest.mark.parametrize("device_masks", [False, True])
@pytest.mark.parametrize("masked", [math.nan, math.inf, 3.0])
@pytest.mark.parametrize("seen", SEEN)
def test_stale_columns_behind_a_window_never_count(seen, masked, device_masks, monkeypatch):
    if device_masks:
        monkeypatch.setattr("kernels.attention.torch_ref._is_finite", lambda out: False)
    assert error(problem(masked=masked, **seen), **seen) < 1e-5


def test_decode_gathers_only_the_windows_blocks(monkeypatch):
    case = make_problem(
        query_lens=[1, 1], context_lens=[1000, 400], num_heads=2, num_kv_heads=2, head_dim=16, block_size=16,
        dtype=torch.float32, device="cpu", sliding_window=30,
    )  # fmt: skip
    backend, gathered = TorchAttention(), []
    gather = backend._keys.gather
    monkeypatch.setattr(backend._keys, "gather", lambda *a: gathered.append(a[1].shape[1]) or gather(*a))
    out = backend.forward(*case, scale=0.25, sliding_window=30)
    assert gathered == [3]
    assert relative_error(out, reference(*case, scale=0.25, sliding_window=30)) < 1e-5


@pytest.mark.parametrize("value_dim", [8, 24])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sliding_window": 5}, {"sinks": torch.ones(4)}])
def test_values_of_another_size_than_keys(value_dim, options):
    case = problem(value_dim=value_dim, sliding_window=options.get("sliding_window"))
    assert TorchAttention().forward(*case, scale=0.25, **options).shape == (case[0].shape[0], 4, value_dim)
    assert error(case, **options) < 1e-5


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}])
def test_caches_may_be_views_with_gaps_between_blocks(options):
    assert error(problem(padding=24, **options), **options) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_write_kv_fills_blocks_that_have_gaps_between_them(dtype):
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pools = [torch.zeros(4, 80).to(dtype) for _ in range(2)]
    views = [pool[:, :64].unflatten(1, (4, 2, 8)) for pool in pools]
    dense = [torch.zeros(4, 4, 2, 8).to(dtype) for _ in range(2)]
    slots, scales = torch.tensor([13, 0, 6]), KVScales(k=0.5, v=2.0)
    write_kv(k, v, *views, slots, scales)
    write_kv(k, v, *dense, slots, scales)
    for pool, view, expected in zip(pools, views, dense, strict=True):
        assert torch.equal(view.float(), expected.float())
        assert not pool[:, 64:].float().any()
