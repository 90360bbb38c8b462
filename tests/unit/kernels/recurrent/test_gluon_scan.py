"""The chunked delta rule for Hopper, with its products and barriers on the CPU, against its specification."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.delta_rule.reference import recurrent_gated_delta_rule
from tests.unit.kernels.triton_cases.recurrent_problem import (
    PADDING,
    Row,
    assert_only_states_changed,
    clone,
    make_delta,
    make_metadata,
    make_view,
    states_after,
)  # fmt: skip

gluon_scan = pytest.importorskip("kernels.delta_rule.gluon_scan", reason="needs triton 3.6", exc_type=ImportError)

SIZES = {"key_heads": 1, "value_heads": 2, "d_k": 128, "d_v": 128}
# A full chunk, a rest, rests of one token and of less than 8, more chunks than stages, padding, rows too short
RAGGED = [Row(130, 5), Row(17, 0, writes=False), Row(16, 3), Row(20, PADDING), Row(64, 64), Row(1, 2), Row(261, 0)]


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("rows", [RAGGED, [Row(300, 64)]])
def test_rows_of_any_length_equal_the_specification(rows, consumers, monkeypatch):
    from kernels.delta_rule import gluon_systems
    from tests.support.gluon_interpreter import interpret

    interpret(gluon_scan, "_scan_kernel", monkeypatch)
    interpret(gluon_systems, "_systems_kernel", monkeypatch)
    metadata = dataclasses.replace(make_metadata(rows), num_decodes=None)
    inputs = make_delta(metadata, **SIZES, dtype=torch.float16)
    assert gluon_scan.takes(*inputs[:4])
    view = make_view(metadata, 256, 128, rows_per_piece=23)
    before, other = clone(view), clone(view)
    out = torch.zeros_like(inputs[2])
    config = gluon_scan.ScanConfig(consumers, 3)
    gluon_systems.advance_on_hopper(
        *inputs, out, view, metadata, rows=(0, len(rows)), scale=0.3, eps=1e-6, short=16, config=config
    )
    expected = recurrent_gated_delta_rule(*inputs, other, metadata, scale=0.3)
    starts = metadata.query_start_loc.tolist()
    for number, row in enumerate(rows):
        own = slice(starts[number], starts[number + 1])
        if row.num_tokens <= 16 or row.start == PADDING:
            assert not out[own].any()
        else:
            assert (out[own].float() - expected[own].float()).norm() <= 4e-3 * expected[own].float().norm()
    is_long = [row.num_tokens > 16 for row in rows]
    states, wanted = states_after(view, metadata)[is_long], states_after(other, metadata)[is_long]
    assert (states - wanted).norm() <= 4e-3 * wanted.norm()
    assert_only_states_changed(view, before, metadata)
