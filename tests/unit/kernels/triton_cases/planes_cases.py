"""Products with 4-bit floats in planes against float64, in Triton's interpreter, and the PTX of codes, executed."""

from __future__ import annotations

import pytest
import torch

from kernels.e2m1 import E2M1_TABLE
from kernels.linear.planes import E2M1_BITS, dequantize_planes
from kernels.linear.planes_configs import PlanesConfig
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_e2m1 import e2m1_asm
from kernels.linear.triton_planes import dequantize as triton_dequantize
from kernels.linear.triton_planes import planes_gemm
from kernels.moe.planes import PlanesMatrix, to_planes
from kernels.moe.storage_lut4 import TABLES, Lut4Matrix
from kernels.moe.triton_planes_decode import lut4_asm
from tests.unit.kernels.triton_cases.float4_problem import KINDS, planes_problem
from tests.unit.kernels.triton_cases.ptx import run_ptx
from tests.unit.kernels.triton_cases.ragged import relative_error


def _error(num_rows, n, k, kind, *, has_bias=False, **cut):
    weight, dense = planes_problem(n, k, kind)
    x, bias = torch.randn(num_rows, k), torch.randn(n) if has_bias else None
    scratch = SplitKScratch.allocate(torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    options = {"block_m": 16, "block_n": 32, "splits": 1, "num_warps": 4, "num_stages": 2, "prefetch": 0}
    out = planes_gemm(x, weight, bias, scratch, config=PlanesConfig(**options | cut))
    assert int(scratch.arrivals.abs().sum()) == 0
    expected = x.double() @ dense.T
    return relative_error(out, expected if bias is None else expected + bias.double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "block_m"), [(1, 8), (8, 8), (64, 64), (100, 64)])
def test_rows(num_rows, block_m, kind):
    assert _error(num_rows, 70, 256, kind, block_m=block_m, splits=2, has_bias=True) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 160, 448])
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_inputs_that_are_no_whole_groups_and_more_splits_than_groups(k, splits, kind):
    assert _error(5, 33, k, kind, splits=splits) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(70, 256), (33, 160)])
def test_the_dense_matrix_is_the_specifications(n, k, kind):
    weight, _ = planes_problem(n, k, kind)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(triton_dequantize(weight, dtype), dequantize_planes(weight, dtype))


def test_ptx_makes_every_code_its_value_times_its_scale():
    for plane, places in enumerate(E2M1_BITS):
        for code, value in enumerate(E2M1_TABLE):
            others = 0xFFFF & ~sum(1 << place for place in places)  # all other codes' bits are set
            word = others | sum(((code >> bit) & 1) << place for bit, place in enumerate(reversed(places)))
            for byte, scale in ((64, 2.0**-63), (127, 1.0), (128, 2.0)):
                factor = byte * 0x00800080 + 0x3F003F00
                pair = run_ptx(e2m1_asm(plane), {"$1": word | (word << 16), "$2": factor}, {})
                assert _halves(pair) == [value * scale] * 2


@pytest.mark.parametrize("kind", TABLES)
def test_ptx_looks_every_code_up(kind):
    table = torch.tensor(TABLES[kind]).bfloat16().float().tolist()
    planes = to_planes(Lut4Matrix(torch.zeros(1, 1, 32, dtype=torch.uint8), torch.ones(1, 1, 1), kind))
    assert isinstance(planes, PlanesMatrix)
    operands = {f"${5 + 2 * place}": octets & 0xFFFFFFFF for place, octets in enumerate(planes.table.tolist())}
    for run in range(2):
        for first in range(16):
            for second in range(16):
                codes = [3, 9, 14, 0, 12, 7, 5, 10]  # of planes 0 to 3 of both neighbours
                codes[2 * run], codes[4 + 2 * run + 1] = first, second
                words = sum(code << (4 * place) for place, code in enumerate(codes))
                for plane, name in ((2 * run, "$0"), (2 * run + 1, "$1")):
                    found = _halves(run_ptx(lut4_asm(run), {"$2": words, **operands}, {}, output=name))
                    assert found == [table[codes[plane]], table[codes[4 + plane]]]


def _halves(pair: int) -> list[float]:
    words = torch.tensor([pair & 0xFFFF, pair >> 16], dtype=torch.int32)
    return words.to(torch.int16).view(torch.bfloat16).float().tolist()
