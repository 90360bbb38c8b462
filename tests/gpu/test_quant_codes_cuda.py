"""Products with 4-bit codes on the device: each lookup, in PTX and from memory, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import quant_codes
from kernels.codes_configs import CodesGemmConfig
from tests.unit.kernels.triton_cases.codes_problem import TABLES, codes_problem
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
# Shared memory for the tables beside the tiles is asked for where the tiles take more than 48 KB: see the cuts' stages
CONFIGS = [
    CodesGemmConfig(8, 128, 1, 4, 4),
    CodesGemmConfig(8, 64, 4, 4, 6, prefetch=0),
    CodesGemmConfig(8, 128, 3, 8, 6, lookup="shared"),
    CodesGemmConfig(16, 64, 2, 4, 4),
    CodesGemmConfig(16, 256, 2, 8, 5, lookup="shared"),
    CodesGemmConfig(64, 64, 2, 4, 4),
    CodesGemmConfig(64, 128, 4, 8, 4),
    CodesGemmConfig(64, 128, 1, 4, 3, lookup="shared"),
    CodesGemmConfig(8, 128, 2, 4, 6, lookup="mixed"),
    CodesGemmConfig(32, 128, 2, 8, 5, lookup="mixed"),
    CodesGemmConfig(8, 64, 2, 4, 4, lookup="load"),
]
SHAPES = [(6144, 4096), (640, 320), (1000, 1088)]  # of Llama 3.1 8B, of the demo model, and one that fits no tile


def _product(weight, config):
    from kernels.triton_codes_gemm import allocate_scratch, codes_gemm

    scratch = allocate_scratch(torch.device("cuda"))
    scratch.partial.fill_(float("nan"))
    return lambda x, bias=None, *, pdl=True: codes_gemm(x, weight, bias, scratch, config=config, pdl=pdl)


@pytest.mark.parametrize("plane", [32, 64])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_products_of_bitsandbytes_codes(config, n, k, plane):
    for dtype in DTYPES:
        weight, dense = codes_problem(n, k, dtype=dtype, plane=plane, device="cuda")
        product = _product(weight, config)
        for num_rows in (1, config.block_m - 1, config.block_m, config.block_m + 5):
            x, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((num_rows, k), (n,)))
            for added in (None, bias):
                expected = x.double() @ dense.T + (0 if added is None else added.double())
                assert relative_error(product(x, added), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("lookup", ["permute", "shared", "mixed"])
def test_every_table_gives_its_values(lookup, table, is_paired):
    """Rows of the identity matrix as x: each weight stands alone, so a value in the wrong place shows."""
    for dtype in DTYPES:
        weight, dense = codes_problem(256, 512, dtype=dtype, table=table, is_paired=is_paired, device="cuda")
        for block_m, num_stages in ((8, 6), (64, 4)):
            product = _product(weight, CodesGemmConfig(block_m, 128, 1, 4, num_stages, lookup=lookup))
            identity = torch.eye(512, device="cuda", dtype=dtype)
            found = torch.cat([product(rows) for rows in identity.split(block_m)])
            assert torch.equal(found, dense.T.float().to(dtype))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_replayed_graph_gives_the_same_bits(config):
    weight, _ = codes_problem(1024, 2048, dtype=torch.bfloat16, device="cuda")
    product = _product(weight, config)
    x = torch.randn(7, 2048, device="cuda").bfloat16()
    expected = product(x, pdl=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [product(x) for _ in range(3)]
    for out in found:
        out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("plane", [32, 64])
def test_matrices_unpack_to_the_bit(plane, dtype):
    from kernels.triton_codes_dequantize import dequantize

    weight, _ = codes_problem(300, 4032, dtype=torch.bfloat16, plane=plane, device="cuda")
    assert torch.equal(dequantize(weight, dtype), quant_codes.dequantize(weight, dtype))
