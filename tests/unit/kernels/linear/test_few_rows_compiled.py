"""Fused products of few rows compile for a Hopper GPU, spill nothing, and load by 16 bytes. Needs Triton's compiler."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import Rounding
from kernels.linear.triton_gemv import allocate_scratch, gated_gemv, gemv
from kernels.linear.triton_row import normed_gemv, row_gemv
from kernels.moe.reference import ExpertSum
from kernels.moe.triton_sums import sum_experts_add_rms_norm


def rows(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


scratch = allocate_scratch(torch.device("cpu"))
with collect_kernels() as kernels:
    for n, k in ((4096, 1024), (5120, 2048), (128, 2048), (32, 2880)):
        late = LateNorm(rows(1, k), rows(1, k), rows(k), 1e-6, rows(1, k))
        normed_gemv(late, rows(n, k), None, normed=rows(1, k) if n < 512 else None, pdl=True)
    normed_gemv(LateNorm(*[rows(1, 1024)] * 2, rows(1024), 1e-6, rows(1, 1024)), rows(6144, 1024), None, gate="silu")
    normed_gemv(LateNorm(*[rows(1, 2048)] * 2, rows(2048), 1e-6, rows(1, 2048)), rows(12288, 2048), None, gate="silu")
    row_gemv(rows(1, 3072), rows(1024, 3072), None, pdl=True)
    for num_rows in (1, 2, 16, 64):
        gemv(rows(num_rows, 2880), rows(5120, 2880), rows(5120), scratch, pdl=True)
        gated_gemv(rows(num_rows, 1024), rows(6144, 1024), scratch, is_gelu=False, pdl=True)
        gated_gemv(rows(num_rows, 4096), rows(28672, 4096), scratch, is_gelu=False, pdl=True)
    for size, top_k, rounding in ((2048, 8, Rounding(128)), (2880, 4, None)):
        experts = torch.zeros(2, top_k, dtype=torch.int32)
        late = ExpertSum(rows(2 * top_k, size), rows(2, top_k), experts, has_absent=False)
        sum_experts_add_rms_norm(late, rows(2, size), rows(size), 1e-6, rounding, pdl=True)
"""


@pytest.mark.full
@needs_triton
def test_fused_products_of_few_rows_compile_and_spill_nothing(tmp_path):
    compiled = compile_kernels(SCRIPT, cache=tmp_path)
    assert {kernel.name for kernel in compiled} == {"_row_kernel", "_gemv_kernel", "_combine_norm_kernel"}
    assert all(kernel.has_wide_loads and kernel.local_bytes == 0 for kernel in compiled), compiled
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES, compiled
