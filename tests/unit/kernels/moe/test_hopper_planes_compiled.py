"""Experts of 4 bits by the kernels for Hopper compile for it and fit. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.moe.configs import hopper_planes_configs
from kernels.moe.planes import to_planes
from kernels.moe.reference import SILU, Gate
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

storage, dtype = sys.argv[1:]
gate = Gate("clamped", alpha=1.702, limit=7.0) if storage == "mxfp4" else SILU
with collect_kernels() as kernels:
    problem = make_problem(
        num_tokens=64, num_experts=4, top_k=4, hidden_size=1024, intermediate_size=768, dtype=getattr(torch, dtype),
        has_biases=storage == "mxfp4", gate=gate,
    )
    if storage in STORAGES:
        problem = pack_integers(problem, STORAGES[storage])
    else:
        problem = pack_experts(problem, storage)
    for config in hopper_planes_configs():
        fused_moe(
            problem.x, problem.logits, to_planes(problem.gate_up), to_planes(problem.down), config=config,
            biases=problem.biases, gate=gate, top_k=4, renormalize=True, round_weights=True, pdl=True,
        )
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        *((name, "bfloat16") for name in ("mxfp4", "nvfp4", "nf4", "awq", "gptq", "packed", "packed_asymmetric")),
        *((name, "float16") for name in ("awq", "gptq")),
    ],
)
def test_products_run_on_the_tensor_cores_and_spill_next_to_nothing(storage, dtype, tmp_path):
    compiled = compile_kernels(SCRIPT, storage, dtype, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name == "_kernel"]
    assert len(products) == 4
    # twelve words at the ends of the loop; the accumulators alone are 512 bytes
    assert all(kernel.has_wgmma and kernel.local_bytes <= 48 for kernel in products), products
    assert max(kernel.shared_bytes for kernel in products) <= HOPPER_SHARED_BYTES, products
