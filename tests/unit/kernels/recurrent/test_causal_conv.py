"""The causal convolution's specification against transformers' functions: ragged rows, states in pieces, padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from kernels.causal_conv.reference import causal_conv
from kernels.states import load_states
from tests.unit.kernels.triton_cases.recurrent_problem import (
    MIXED,
    ONE_TOKEN,
    RAGGED,
    SHORT,
    Row,
    assert_only_states_changed,
    clone,
    make_conv,
    make_metadata,
    make_view,
    states_after,
)  # fmt: skip


def by_transformers(x, weight, bias, states, metadata, *, has_silu, source):
    """Outputs and states of each row from transformers' own functions."""
    out, after = torch.zeros_like(x), states.clone()
    starts = metadata.query_start_loc.tolist()
    activation = "silu" if has_silu else None
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        first, end = starts[row], starts[row + 1]
        if seq_len == 0 or first == end:
            continue
        if seq_len == end - first:  # transformers has no state yet, and pads with zeros itself
            y = source.causal_conv1d_fn(x[None, first:end].mT, weight, bias, activation)
            after[row] = torch.cat((states[row], x[first:end].T), 1)[:, -states.shape[2] :]
        else:
            y = source.causal_conv1d_update(x[None, first:end].mT, after[row][None], weight, bias, activation)
        out[first:end] = y[0].T
    return out, after


@pytest.mark.parametrize("source", [qwen, kimi])
@pytest.mark.parametrize("rows", [RAGGED, ONE_TOKEN, SHORT, MIXED])
@pytest.mark.parametrize(("has_bias", "has_silu", "width"), [(True, True, 4), (False, True, 4), (True, False, 3)])
def test_each_row_is_convolved_as_transformers_does(source, rows, has_bias, has_silu, width):
    metadata = make_metadata(rows)
    view = make_view(metadata, 22, width - 1)
    before, states = clone(view), load_states(view, metadata)
    x, weight, bias = make_conv(metadata, 22, width)
    bias = bias if has_bias else None
    out = causal_conv(x, weight, bias, view, metadata, has_silu=has_silu)
    expected, after = by_transformers(x.contiguous(), weight, bias, states, metadata, has_silu=has_silu, source=source)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    may_write = metadata.seq_lens > 0 if metadata.writes is None else (metadata.seq_lens > 0) & (metadata.writes > 0)
    is_kept = (metadata.seq_lens > metadata.query_start_loc.diff()) & ~may_write
    kept = states_after(view, metadata)
    assert torch.equal(kept[may_write], after[may_write])
    assert torch.equal(kept[is_kept], states[is_kept])
    assert_only_states_changed(view, before, metadata)


def test_a_row_cut_anywhere_gives_the_same_bits():
    """If channels fill the CPU's vectors: torch rounds the SiLU of the rest in another way."""
    whole = make_metadata([Row(150, 0)])
    x, weight, bias = make_conv(whole, 32, 4)
    view = make_view(whole, 32, 3)
    expected = causal_conv(x, weight, bias, view, whole, has_silu=True)
    other, out, start = make_view(whole, 32, 3), [], 0
    for size in (1, 2, 60, 1, 1, 3, 82):
        part = dataclasses.replace(make_metadata([Row(size, start)]), pages=whole.pages, req_index=whole.req_index)
        out.append(causal_conv(x[start : start + size], weight, bias, other, part, has_silu=True))
        start += size
    assert torch.equal(torch.cat(out), expected)
    assert torch.equal(states_after(other, whole), states_after(view, whole))


def test_tokens_behind_the_last_row_change_nothing():
    metadata = make_metadata([Row(3, 4), Row(1, 0)])
    x, weight, bias = make_conv(metadata, 32, 4)
    view = make_view(metadata, 32, 3)
    longer = torch.cat((x, torch.full((2, 32), torch.nan)))
    out = causal_conv(longer, weight, bias, clone(view), metadata, has_silu=True)
    assert torch.equal(out[:4], causal_conv(x, weight, bias, view, metadata, has_silu=True))


def test_outputs_have_the_dtype_of_the_inputs():
    metadata = make_metadata(RAGGED)
    x, weight, bias = make_conv(metadata, 22, 4, dtype=torch.bfloat16)
    view = make_view(metadata, 22, 3)
    expected = causal_conv(x.float(), weight.float(), bias.float(), clone(view), metadata, has_silu=True)
    out = causal_conv(x, weight, bias, view, metadata, has_silu=True)
    assert out.is_contiguous()
    assert torch.equal(out, expected.bfloat16())
