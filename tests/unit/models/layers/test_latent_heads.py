"""The heads of latent attention are the stored matrix, whatever scale the checkpoint has for its activations."""

from types import SimpleNamespace

import pytest
import torch

from kernels.linear.reference import quantize_rows
from models.layers.latent_attention import _read_heads
from models.parallel import TensorParallel
from models.quantization.fp8 import Fp8, Fp8Params
from models.quantization.int8 import Int8, Int8Params

RANK, NOPE, VALUES, HEADS = 32, 16, 8, 3
WEIGHT = torch.randn(HEADS * (NOPE + VALUES), RANK, generator=torch.Generator().manual_seed(0))


def fp8(input_scale):
    values, scales = quantize_rows(WEIGHT)
    return (
        Fp8("row", "static", is_stored=True),
        Fp8Params(values, scales, input_scale),
        values.float() * scales[:, None],
    )


def int8(input_scale):
    scales = WEIGHT.abs().amax(1) / 127
    values = (WEIGHT / scales[:, None]).round().to(torch.int8)
    return (
        Int8("row", "static").make_method(),
        Int8Params(values, scales, input_scale),
        values.float() * scales[:, None],
    )


@pytest.mark.parametrize("input_scale", [None, 0.03, 0.001])
@pytest.mark.parametrize("make", [fp8, int8])
def test_a_static_scale_of_activations_does_not_change_the_matrix(make, input_scale):
    method, params, expected = make(None if input_scale is None else torch.tensor(input_scale))
    stored = SimpleNamespace(load=lambda w, parts: params, apply=method.apply)
    keys, values = _read_heads(
        SimpleNamespace(num_heads=HEADS),
        SimpleNamespace(rank=RANK, nope_dim=NOPE, v_head_dim=VALUES),
        SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32),
        TensorParallel(),
        stored,
    )
    found = torch.cat((keys, values.transpose(1, 2)), dim=1).flatten(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
