"""Kernels of delta-rule layers compile for a Hopper GPU at real shapes, and fit it. Needs no GPU, but the compiler."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import dataclasses
import sys

from kernels.causal_conv.triton import causal_conv
from kernels.delta_rule.triton import gated_delta_rule, gated_delta_step
from kernels.delta_rule.triton_gates import delta_gates, gated_rms_norm
from kernels.states import StateView
from tests.unit.kernels.triton_cases.recurrent_problem import Row, make_conv, make_delta, make_metadata


def launch(rows, key_heads, value_heads, d_k, d_v, by_dimension):
    metadata = dataclasses.replace(make_metadata(rows), num_decodes=None)
    pool = torch.zeros(2, 9, 4096)
    sizes = {"key_heads": key_heads, "value_heads": value_heads, "d_k": d_k, "d_v": d_v}
    q, k, v, g, beta = make_delta(metadata, **sizes, by_dimension=by_dimension, dtype=torch.bfloat16)
    view = StateView(pool, 3, value_heads * d_v, d_k)
    gated_delta_rule(q, k, v, g, beta, view, metadata, scale=0.1, pdl=True)
    channels = 2 * key_heads * d_k + value_heads * d_v
    x, weight, bias = make_conv(metadata, channels, 4, dtype=torch.bfloat16)
    causal_conv(x, weight, bias, StateView(pool, 1, channels, 3), metadata, has_silu=True, pdl=True)
    gated_rms_norm(v, v, weight[:d_v, 0].contiguous(), 1e-6, pdl=True)
    if len(set(rows)) == 1 and rows[0].num_tokens == 1:
        gates = g.bfloat16(), beta.bfloat16(), beta[0], g[0].flatten()
        gated_delta_step(q, k, v, *gates, view, metadata, scale=0.1, pdl=True)
    delta_gates(g.bfloat16(), beta.bfloat16(), beta[0], g[0].flatten(), pdl=True)


sizes = [int(size) for size in sys.argv[1:]]
with collect_kernels() as kernels:
    for rows in ([Row(1, 3)] * 64, [Row(4, 3)] * 4, [Row(300, 3), Row(1, 5)]):
        launch(rows, *sizes)
"""
OF_ALL = {"_short_rows_kernel", "_scan_kernel", "_step_kernel", "_causal_conv_kernel", "_gated_rms_norm_kernel"}
OF_ALL |= {"_gates_kernel"}
# Key heads, value heads, d_k, d_v, a gate for each key dimension
SHAPES = {
    "Qwen3.5": "16 32 128 128 0",
    "OLMo-Hybrid": "30 30 96 192 0",
    "Kimi-Linear": "32 32 128 128 1",
    "wide": "2 2 256 256 1",
}


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("family", SHAPES)
def test_kernels_of_every_family_compile_and_fit(family, tmp_path):
    compiled = compile_kernels(SCRIPT, *SHAPES[family].split(), cache=tmp_path)
    by_chunk = {"_dimensions_kernel" if SHAPES[family].endswith("1") else "_scalars_kernel"}
    assert {kernel.name for kernel in compiled} == OF_ALL | by_chunk
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES
