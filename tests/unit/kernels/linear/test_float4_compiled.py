"""Products with 4-bit floats compile for a Hopper GPU and fit it. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

from kernels.linear.lut4_configs import float4_gemm_config
from kernels.linear.triton_float4 import dequantize, float4_gemm
from kernels.linear.splits import SplitKScratch
from tests.unit.kernels.triton_cases.float4_problem import float4_problem

scratch = SplitKScratch.allocate(torch.device("cpu"))
with collect_kernels() as kernels:
    for n, k, dtype in ((4096, 1024, torch.bfloat16), (1000, 1088, torch.float16)):
        weight, _ = float4_problem(n, k, sys.argv[1], dtype=dtype)
        for num_rows in (1, 16, 32, 64):
            config = float4_gemm_config(num_rows=num_rows, n=n, k=k, block=weight.block, is_shared=True)
            x = torch.zeros(num_rows, k, dtype=dtype)
            float4_gemm(x, weight, None, scratch, config=config, pdl=True)
    dequantize(weight, torch.bfloat16)
"""
PLANES_SCRIPT = """
import sys

from kernels.linear import triton_planes
from kernels.linear.planes_configs import planes_config
from kernels.linear.splits import SplitKScratch
from tests.unit.kernels.triton_cases.float4_problem import planes_problem

triton_planes.has_ptx = lambda x: True  # though the tensors are on the CPU
scratch = SplitKScratch.allocate(torch.device("cpu"))
with collect_kernels() as kernels:
    for n, k, rows in ((17408, 512, (1, 16)), (4096, 1024, (1, 16, 32, 64)), (1000, 1088, (1, 16, 32, 64))):
        weight, _ = planes_problem(n, k, sys.argv[1])
        for num_rows in rows:
            config = planes_config(num_rows=num_rows, n=n, k=k)
            x = torch.zeros(num_rows, k, dtype=torch.bfloat16)
            triton_planes.planes_gemm(x, weight, None, scratch, config=config, pdl=True)
    triton_planes.dequantize(weight, torch.bfloat16)
"""
_TABLES = 32 * 1024  # of the lookups, which Triton does not count
_UNASKED = 48 * 1024  # more must be asked for, and Triton asks only for what it counts


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_every_cut_compiles_and_fits_beside_its_tables(kind, tmp_path):
    compiled = compile_kernels(SCRIPT, kind, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name == "_float4_gemm_kernel"]
    assert len(products) == 8
    assert len(compiled) == 9
    for kernel in products:
        assert _UNASKED < kernel.shared_bytes <= HOPPER_SHARED_BYTES - _TABLES, compiled
        assert kernel.has_wide_loads, compiled


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_every_cut_in_planes_compiles_fits_and_spills_nothing(kind, tmp_path):
    compiled = compile_kernels(PLANES_SCRIPT, kind, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name == "_planes_gemm_kernel"]
    assert len(products) == 10
    assert len(compiled) == 11
    for kernel in products:
        assert kernel.shared_bytes <= HOPPER_SHARED_BYTES // 2, compiled  # two programs on a multiprocessor
        assert kernel.has_wide_loads, compiled
        assert kernel.local_bytes == 0, compiled
