"""Products of 16 bits for Hopper with their gate, against float64, with ragged rows, outputs and inputs."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.dense import LEAST_ROWS, DenseConfig
from kernels.linear.late_norm import gated_linear
from kernels.linear.ops import DenseLinear
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}  # of the output's rounding
CONFIGS = [DenseConfig(), DenseConfig(group=1), DenseConfig(num_stages=2)]
# Outputs of gate and inputs: of Qwen3 0.6B, one tile, and those that end within a tile and a step
SHAPES = [(3072, 1024), (128, 64), (1000, 1096), (136, 200), (320, 2048)]
ROWS = [1, 64, 65, 191, 192, 193, 1000, 4097]


def _problem(num_rows: int, size: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_rows, k, device="cuda") * torch.logspace(-1, 1, num_rows, device="cuda")[:, None]
    return x.to(dtype), (torch.randn(2 * size, k, device="cuda") * k**-0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize(("size", "k"), SHAPES)
def test_products_with_a_gate(size, k, is_gelu, dtype):
    from kernels.linear import gluon_dense

    for num_rows in ROWS:
        x, w = _problem(num_rows, size, k, dtype)
        assert gluon_dense.takes(x, w)
        expected = gated_linear(x.double(), w.double(), is_gelu=is_gelu)
        for config, pdl in [(CONFIGS[0], False), *((config, True) for config in CONFIGS)]:
            out = gluon_dense.gated_linear(x, w, is_gelu=is_gelu, config=config, pdl=pdl)
            assert out.shape == (num_rows, size)
            assert out.dtype == dtype
            assert relative_error(out, expected) < TOLERANCE[dtype], (num_rows, config)
            assert relative_error(out[-1], expected[-1]) < TOLERANCE[dtype], (num_rows, config)


def test_gates_far_from_zero_have_no_nan():
    from kernels.linear import gluon_dense

    x = torch.zeros(192, 64, device="cuda", dtype=torch.bfloat16)
    x[:, 0] = torch.linspace(-300, 300, 192, device="cuda")
    w = torch.zeros(256, 64, device="cuda", dtype=torch.bfloat16)
    w[:128, 0], w[128:, 0] = 1.0, 1.0 / 64
    for is_gelu in (False, True):
        expected = gated_linear(x.double(), w.double(), is_gelu=is_gelu)
        out = gluon_dense.gated_linear(x, w, is_gelu=is_gelu)
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-5)


def test_rows_of_a_wider_tensor_and_what_the_kernel_refuses():
    from kernels.linear import gluon_dense

    x, w = _problem(300, 256, 1024, torch.bfloat16)
    part = x[:, 256:768]
    out = gluon_dense.gated_linear(part, w[:, :512].contiguous(), is_gelu=False)
    expected = gated_linear(part.double(), w[:, :512].double(), is_gelu=False)
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]
    assert not gluon_dense.takes(x[:, 1:], w[:, 1:])  # not aligned to 16 bytes
    assert not gluon_dense.takes(x.float(), w.float())
    assert not gluon_dense.takes(x.T, w)


def test_the_rule_decides_and_a_graph_replays_the_kernel():
    linear = DenseLinear()
    x, w = _problem(8192, 3072, 1024, torch.bfloat16)
    assert linear.gates(x, w)
    assert not linear.gates(x[:64], w)
    assert not linear.gates(x[:1024], w)
    assert not linear.gates(x.float(), w.float())
    eager = linear.gated(x, w, is_gelu=False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = linear.gated(x, w, is_gelu=False)
    x.copy_(x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed, eager.flip(0))


@pytest.mark.parametrize("num_rows", [2, 16, LEAST_ROWS, 3000])
def test_few_and_many_rows_that_gate_equal_the_specification(num_rows):
    linear = DenseLinear()
    x, w = _problem(num_rows, 3072, 1024, torch.bfloat16)
    if num_rows != LEAST_ROWS:  # whose tiles of this matrix fill half of the device's second turn
        assert linear.gates(x, w)
    out = linear.gated(x, w, is_gelu=True)
    assert relative_error(out, gated_linear(x.double(), w.double(), is_gelu=True)) < TOLERANCE[torch.bfloat16]
