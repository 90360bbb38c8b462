"""Mixtures of integers compile for a Hopper GPU, fit it, and read 16 bytes at once. Needs Triton's compiler, no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem

# Qwen3-30B-A3B, with fewer experts
problem = make_problem(
    num_tokens=1024, num_experts=4, top_k=4, hidden_size=2048, intermediate_size=768, dtype=getattr(torch, sys.argv[3])
)
problem = pack_integers(problem, STORAGES[sys.argv[1]])
gate_up, down = problem.gate_up, problem.down
if sys.argv[2] == "planes":
    from kernels.moe import triton_planes, triton_planes_pairs
    from kernels.moe.planes import to_planes

    gate_up, down = to_planes(gate_up), to_planes(down)
    for module in (triton_planes, triton_planes_pairs):
        module.has_ptx = lambda x, w: True  # though the tensors are on the CPU
with collect_kernels() as kernels:
    for num_tokens in (1, 4, 16, 64, 1024):
        fused_moe(
            problem.x[:num_tokens], problem.logits[:num_tokens], gate_up, down,
            top_k=4, renormalize=True, round_weights=True, pdl=True,
        )
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("storage", ["awq", "gptq_8bit", "packed", "packed_channel"])
def test_every_cut_of_experts_in_integers_compiles_fits_and_loads_widely(storage, tmp_path):
    compiled = compile_kernels(SCRIPT, storage, "rows", "bfloat16", cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name in ("_grouped_kernel", "_pairs_up_kernel")]
    assert {kernel.name for kernel in compiled} >= {"_grouped_kernel", "_pairs_up_kernel", "_pairs_down_kernel"}
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES, compiled
    assert all(kernel.has_wgmma for kernel in products if kernel.name == "_grouped_kernel"), compiled
    assert all(kernel.has_wide_loads for kernel in products if kernel.name == "_grouped_kernel"), compiled


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        *((name, "bfloat16") for name in ("awq", "gptq", "packed", "packed_asymmetric", "packed_channel")),
        *((name, "float16") for name in ("awq", "packed")),
    ],
)
def test_every_cut_of_integers_in_planes_compiles_fits_and_loads_widely(storage, dtype, tmp_path):
    compiled = compile_kernels(SCRIPT, storage, "planes", dtype, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name == "_planes_kernel"]
    assert len(products) > 2  # gate and up, and down, of several configs
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES, compiled
    assert all(kernel.has_wide_loads for kernel in products), compiled
    assert all(kernel.has_wgmma for kernel in products), compiled
