"""Products of 16 bits for Hopper, with a gate and plain, against float64, with ragged rows, outputs and inputs."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import ops
from kernels.linear.dense import DenseConfig, gated_linear, pays
from tests.unit.kernels.triton_cases.ragged import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}  # of the output's rounding
CONFIGS = [
    DenseConfig(),
    DenseConfig(is_ahead=False, group=1),
    DenseConfig(consumers=2, num_stages=4, group=16),
    DenseConfig(consumers=2, num_stages=4, group=16, is_joint=True),
]
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "k"), SHAPES)
def test_plain_products(size, k, dtype):
    from kernels.linear import gluon_dense

    for num_rows in ROWS:
        x, w = _problem(num_rows, size, k, dtype)
        expected = x.double() @ w.double().T
        for config in CONFIGS:
            out = gluon_dense.dense_linear(x, w, config=config, pdl=True)
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
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    x, w = _problem(8192, 3072, 1024, torch.bfloat16)
    assert ops.gated_linear(x[:64], w, is_gelu=False) is None
    assert pays(num_rows=8192, n=6144, k=1024, num_sms=num_sms)
    eager = ops.gated_linear(x, w, is_gelu=False)
    assert eager is not None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = ops.gated_linear(x, w, is_gelu=False)
    x.copy_(x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed, eager.flip(0))
