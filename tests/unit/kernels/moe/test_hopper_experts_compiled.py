"""FP8 experts by the kernels for Hopper compile for it, fit and spill nothing. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)

from kernels.moe.configs import HopperFp8Config
from kernels.moe.planes import to_planes
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

with collect_kernels() as kernels:
    for has_biases in (False, True):
        problem = make_problem(
            num_tokens=64, num_experts=4, top_k=4, hidden_size=1024, intermediate_size=768, dtype=torch.bfloat16,
            has_biases=has_biases,
        )
        problem = pack_experts(problem, "fp8", block=128)
        fused_moe(
            problem.x, problem.logits, to_planes(problem.gate_up), to_planes(problem.down), config=HopperFp8Config(),
            biases=problem.biases, top_k=4, renormalize=True, round_weights=True, pdl=True,
        )
"""


@pytest.mark.full
@needs_triton
def test_products_run_on_the_tensor_cores_and_spill_nothing(tmp_path):
    compiled = compile_kernels(SCRIPT, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name == "_kernel"]
    assert len(products) == 4
    assert all(kernel.has_wgmma and kernel.local_bytes == 0 for kernel in products), products
    assert max(kernel.shared_bytes for kernel in products) <= HOPPER_SHARED_BYTES, products
