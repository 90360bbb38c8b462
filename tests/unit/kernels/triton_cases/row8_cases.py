"""Products of one row of 8 bits against their torch specifications, through Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kernels.linear import reference, w8a8
from kernels.linear.few_rows_configs import Row8Config, row8_config
from kernels.linear.reference import FP8
from kernels.linear.triton_row8 import row8_linear

SHAPES = [(37, 1040), (40, 256), (5, 16), (130, 144)]  # N, K: all but (40, 256) fill no tile, nor blocks of scales
SERVED = [row8_config(n=n, k=k, dtype=FP8, by_block=by_block)
          for n, k in ((28672, 4096), (4096, 14336)) for by_block in (False, True)]  # fmt: skip
CONFIGS = list(dict.fromkeys([Row8Config(16, 256, 1, 512), *SERVED]))
INTEGERS = [row8_config(n=4096, k=k, dtype=torch.int8, by_block=False) for k in (1024, 4096, 2880)]


@pytest.fixture
def _dp4a(monkeypatch):
    """The instruction that multiplies four integers, which Triton's interpreter has not."""

    def run(builder, code, constraints, operands, types, is_pure, pack):
        assert (code, constraints, pack) == ("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", 1)
        a, b, sums = (np.ascontiguousarray(operand.data) for operand in operands)
        assert a.dtype == b.dtype == sums.dtype == np.int32
        bytes_of = [each.view(np.int8).reshape(*each.shape, 4).astype(np.int32) for each in (a, b)]
        result = sums + (bytes_of[0] * bytes_of[1]).sum(-1, dtype=np.int32)
        return SimpleNamespace(get_result=lambda index: interpreter.TensorHandle(result, operands[2].dtype))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", run)


def test_the_configs_that_are_served_differ():
    assert len(set(SERVED)) == len(set(INTEGERS)) + 1 == 4


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_scaled_by_row(n, k, has_bias, config):
    x, w = reference.quantize_rows(torch.randn(1, k)), reference.quantize_rows(torch.randn(n, k) * torch.rand(n, 1))
    bias = torch.randn(n) if has_bias else None
    out = row8_linear(*x, *w, bias, dtype=torch.float32, config=config)
    expected = reference.rows_linear(*x, *w, bias, torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("rows", "has_bias"), [(128, True), (64, False), (16, True)])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_scaled_by_block(n, k, rows, has_bias, config):
    x = reference.quantize_groups(torch.randn(1, k) * torch.logspace(-2, 2, k), 128)
    w = reference.quantize_blocks(torch.randn(n, k) * torch.rand(n, 1), rows, 128)
    bias = torch.randn(n) if has_bias else None
    out = row8_linear(*x, *w, bias, dtype=torch.float16, config=config, rows_per_scale=rows)
    expected = reference.blocks_linear(*x, *w, bias, torch.float32, rows=rows, columns=128)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def test_a_value_that_is_not_finite_spoils_what_it_is_multiplied_with():
    config = Row8Config(4, 64, 1)
    for by_block in (False, True):
        x = torch.randn(1, 144)
        x[0, 3] = float("nan")
        x, rows = (reference.quantize_groups(x, 128), 16) if by_block else (reference.quantize_rows(x), 0)
        w = torch.randn(20, 144)
        w = reference.quantize_blocks(w, 16, 128) if by_block else reference.quantize_rows(w)
        assert row8_linear(*x, *w, None, dtype=torch.float32, config=config, rows_per_scale=rows).isnan().all()


@pytest.mark.usefixtures("_dp4a")
@pytest.mark.parametrize("config", [Row8Config(16, 256, 1, 512), *INTEGERS])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_of_integers(n, k, has_bias, config):
    x, w = w8a8.quantize_rows_int8(torch.randn(1, k)), w8a8.quantize_rows_int8(torch.randn(n, k))
    bias = torch.randn(n) if has_bias else None
    out = row8_linear(*x, *w, bias, dtype=torch.float32, config=config)
    expected = w8a8.int8_linear(*x, *w, bias, torch.float32)
    # to the bit but for the order of factors: the sums are of integers
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
