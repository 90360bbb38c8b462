"""Products of few tokens compile for a Hopper GPU with every load in 16 bytes. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_REGISTERS, compile_kernels, needs_triton

SCRIPT = """
import sys

from kernels.moe.configs import FewConfig, FewTile
from kernels.moe.planes import to_planes
from kernels.moe.reference import SILU, Gate
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

(storage,) = sys.argv[1:]
is_clamped = storage == "mxfp4"
gate = Gate("clamped", alpha=1.702, limit=7.0) if is_clamped else SILU
problem = make_problem(
    num_tokens=8, num_experts=4, top_k=4, hidden_size=2048, intermediate_size=768, dtype=torch.bfloat16,
    has_biases=is_clamped, gate=gate,
)
if storage in STORAGES:
    problem = pack_integers(problem, STORAGES[storage])
else:
    problem = pack_experts(problem, storage, block=128)
configs = (
    FewConfig(1, FewTile(16, 8, 8, 4), FewTile(16, 8, 2, 6), sums=True, chunk_tokens=None),
    FewConfig(1, FewTile(16, 8, 8, 4), FewTile(16, 8, 2, 6), sums=True, chooses=True),
    FewConfig(8, FewTile(64, 4, 1, 3), FewTile(64, 4, 1, 3), chunk_tokens=None),
)
with collect_kernels() as kernels:
    for config in configs:
        fused_moe(
            problem.x, problem.logits, to_planes(problem.gate_up), to_planes(problem.down), config=config,
            biases=problem.biases, gate=gate, top_k=4, renormalize=True, round_weights=True, pdl=True,
        )
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("storage", ["mxfp4", "nvfp4", "fp8", "awq", "gptq", "packed", "packed_asymmetric"])
def test_codes_go_from_memory_to_registers_without_spills(storage, tmp_path):
    compiled = compile_kernels(SCRIPT, storage, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name in ("_product_kernel", "_sum_kernel")]
    assert len(products) == 6
    assert all(kernel.has_wide_loads and kernel.local_bytes == 0 for kernel in products), products
    assert all(kernel.registers <= HOPPER_REGISTERS // 2 for kernel in products), products
    # of sums alone: values that went through it would take 16 KiB and more
    assert all(kernel.shared_bytes <= 4096 for kernel in products), products
