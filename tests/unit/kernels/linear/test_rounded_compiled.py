"""Ops that round for the product after them compile for a Hopper GPU. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import compile_kernels, needs_triton

SCRIPT = """
from kernels.linear.rounding import Rounding
from kernels.linear.triton_rounded import add_rms_norm_rounded, gate_and_mul_rounded
from kernels.linear.triton_scaled8 import quantize_by_int8, quantize_rows_int8
from kernels.moe.reference import ExpertSum
from kernels.moe.triton_sums import sum_experts_add_rms_norm

scale, weight = torch.ones(()), torch.ones(1024)
roundings = [Rounding(), Rounding(128), Rounding(scale=scale)]
roundings += [Rounding(dtype=torch.int8), Rounding(scale=scale, dtype=torch.int8)]
x, wide = (torch.zeros(2, size, dtype=torch.bfloat16) for size in (1024, 6144))
experts = torch.zeros(2, 8, dtype=torch.int32)
late = ExpertSum(torch.zeros(16, 1024, dtype=torch.bfloat16), torch.zeros(2, 8), experts, has_absent=False)
with collect_kernels() as kernels:
    for rounding in roundings:
        add_rms_norm_rounded(x, x, weight, 1e-5, rounding, pdl=True)
        gate_and_mul_rounded(wide, rounding, is_gelu=False, pdl=True)
        sum_experts_add_rms_norm(late, x, weight, 1e-5, rounding, pdl=True)
    for size in (4104, 14_336, 15_000):
        gate_and_mul_rounded(torch.zeros(2, 2 * size, dtype=torch.bfloat16), Rounding(), is_gelu=True, pdl=True)
    quantize_rows_int8(x, pdl=True)
    quantize_by_int8(x, scale, pdl=True)
"""


@pytest.mark.full
@needs_triton
def test_every_rounding_compiles_and_spills_nothing(tmp_path):
    compiled = compile_kernels(SCRIPT, cache=tmp_path)
    assert len(compiled) == 20
    assert all(kernel.has_wide_loads and kernel.local_bytes == 0 for kernel in compiled), compiled
