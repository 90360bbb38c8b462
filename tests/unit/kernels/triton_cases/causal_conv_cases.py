"""The causal convolution's Triton twin against its specification, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.causal_conv import reference
from kernels.causal_conv import triton as twin
from tests.unit.kernels.triton_cases.recurrent_problem import (
    MIXED,
    ONE_TOKEN,
    RAGGED,
    SHORT,
    assert_only_states_changed,
    clone,
    make_conv,
    make_metadata,
    make_view,
    states_after,
)  # fmt: skip

# The interpreter truncates to bf16 instead of rounding: half precision stands for it
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def assert_twins_agree(rows, *, channels=22, width=4, has_bias=True, has_silu=True, dtype=torch.float32):
    metadata = make_metadata(rows)
    x, weight, bias = make_conv(metadata, channels, width, dtype=dtype)
    bias = bias if has_bias else None
    view = make_view(metadata, channels, width - 1)
    before, other = clone(view), clone(view)
    out = twin.causal_conv(x, weight, bias, view, metadata, has_silu=has_silu)
    expected = reference.causal_conv(x, weight, bias, other, metadata, has_silu=has_silu)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(states_after(view, metadata), states_after(other, metadata))
    assert_only_states_changed(view, before, metadata)


@pytest.mark.parametrize("rows", [RAGGED, ONE_TOKEN, SHORT, MIXED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_any_length_equal_the_specification(rows, dtype):
    assert_twins_agree(rows, dtype=dtype)


@pytest.mark.parametrize(
    ("width", "has_bias", "has_silu", "channels"), [(3, False, False, 22), (2, True, False, 40), (4, False, True, 300)]
)
def test_other_widths_and_options_equal_the_specification(width, has_bias, has_silu, channels):
    assert_twins_agree(
        SHORT if channels > 200 else MIXED, width=width, has_bias=has_bias, has_silu=has_silu, channels=channels
    )


@pytest.mark.parametrize(("width", "channels"), [(2, 22), (3, 300), (4, 550), (6, 40)])
@pytest.mark.parametrize("num_times", [1, 3])
def test_rows_of_one_token_of_any_width_equal_the_specification(width, channels, num_times):
    assert_twins_agree(ONE_TOKEN * num_times, width=width, channels=channels)
