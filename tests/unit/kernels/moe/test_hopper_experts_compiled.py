"""Experts by the kernels for Hopper compile for it, fit it and spill nothing. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.moe.configs import HopperFp8Config, HopperGroupedConfig
from kernels.moe.planes import to_planes
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

configs = {
    "fp8": [HopperFp8Config()],
    "dense": [HopperGroupedConfig(), HopperGroupedConfig(lag=2), HopperGroupedConfig(gathers=True)],
}[sys.argv[1]]
with collect_kernels() as kernels:
    for has_biases in (False, True):
        problem = make_problem(
            num_tokens=64, num_experts=4, top_k=4, hidden_size=1024, intermediate_size=768, dtype=torch.bfloat16,
            has_biases=has_biases,
        )
        gate_up, down = problem.gate_up, problem.down
        if sys.argv[1] == "fp8":
            problem = pack_experts(problem, "fp8", block=128)
            gate_up, down = to_planes(problem.gate_up), to_planes(problem.down)
        for config in configs:
            fused_moe(
                problem.x, problem.logits, gate_up, down, config=config, biases=problem.biases,
                top_k=4, renormalize=True, round_weights=True, pdl=True,
            )
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(("storage", "number"), [("fp8", 4), ("dense", 10)])
def test_products_run_on_the_tensor_cores_and_spill_nothing(storage, number, tmp_path):
    compiled = compile_kernels(SCRIPT, storage, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name == "_kernel"]
    assert len(products) == number
    assert all(kernel.has_wgmma and kernel.local_bytes == 0 for kernel in products), products
    assert max(kernel.shared_bytes for kernel in products) <= HOPPER_SHARED_BYTES, products
