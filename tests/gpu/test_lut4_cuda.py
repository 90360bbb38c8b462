"""Products with 4-bit codes on the device: lookups in shared memory, in PTX, and by loads, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import reference
from kernels.linear.lut4_configs import lut4_gemm_config
from kernels.linear.ops import Linear4Bit
from tests.unit.kernels.triton_cases.lut4_problem import TABLES, lut4_problem
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
# Of Llama 3.1 8B, of the demo model, and one that fits no tile; each costs a compilation per size of tile
PROBLEMS = [
    (6144, 4096, torch.bfloat16),
    (640, 320, torch.bfloat16),
    (1000, 1088, torch.bfloat16),
    (1000, 1088, torch.float16),
]


def _product(weight):
    """As lut4_gemm is called for serving, but with the lookup that is asked for."""
    from kernels.linear.splits import SplitKScratch
    from kernels.linear.triton_lut4 import can_lut4_gemm, lut4_gemm

    scratch = SplitKScratch.allocate(torch.device("cuda"))
    scratch.partial.fill_(float("nan"))

    def product(x, bias=None, *, is_shared=True, pdl=True):
        assert can_lut4_gemm(x, weight)
        config = lut4_gemm_config(num_rows=x.shape[0], n=weight.out_features, k=weight.in_features, is_shared=is_shared)
        return lut4_gemm(x, weight, bias, scratch, config=config, pdl=pdl)

    return product


@pytest.mark.parametrize(("n", "k", "dtype"), PROBLEMS)
def test_products_of_every_size_of_tile(n, k, dtype):
    weight, dense = lut4_problem(n, k, dtype=dtype, device="cuda")
    product, bias = _product(weight), torch.randn(n, device="cuda").to(dtype)
    for num_rows in (1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128):
        x = torch.randn(num_rows, k, device="cuda").to(dtype)
        expected = x.double() @ dense.T + bias.double()
        for is_shared in (True, False) if num_rows <= 8 else (True,):
            assert relative_error(product(x, bias, is_shared=is_shared), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_table_gives_its_values(dtype, table):
    """Rows of the identity matrix as x: each weight stands alone, so a value in the wrong place shows."""
    weight, dense = lut4_problem(256, 512, dtype=dtype, table=table, device="cuda")
    product, identity = _product(weight), torch.eye(512, device="cuda", dtype=dtype)
    expected = dense.T.float().to(dtype)
    for num_rows in (8, 16, 32, 64):
        assert torch.equal(torch.cat([product(rows) for rows in identity.split(num_rows)]), expected)
    assert torch.equal(torch.cat([product(rows, is_shared=False) for rows in identity.split(8)]), expected)


@pytest.mark.parametrize("num_rows", [1, 64, 128])
def test_a_replayed_graph_gives_the_same_bits(num_rows):
    weight, _ = lut4_problem(1024, 2048, dtype=torch.bfloat16, device="cuda")
    product, x = _product(weight), torch.randn(num_rows, 2048, device="cuda").bfloat16()
    expected = product(x, pdl=False)
    product(x)  # compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [product(x) for _ in range(3)]
    for out in found:
        out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


def test_what_no_kernel_takes_is_multiplied_all_the_same():
    weight, dense = lut4_problem(1000, 1088, dtype=torch.bfloat16, device="cuda")
    wide, many = torch.randn(4, 1100, device="cuda").bfloat16(), torch.randn(300, 1088, device="cuda").bfloat16()
    for x in (wide[:, :1088], wide[:, 5:1093], many):
        assert relative_error(Linear4Bit()(x, weight, None), x.double() @ dense.T) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_matrices_unpack_to_the_bit(dtype):
    from kernels.linear.triton_lut4 import dequantize

    weight, _ = lut4_problem(300, 4032, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(dequantize(weight, dtype), reference.dequantize_lut4(weight, dtype))
