"""Mixtures of every storage compile for a Hopper GPU and fit it. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_REGISTERS, HOPPER_SHARED_BYTES, compile_kernels, needs_triton

SCRIPT = """
import sys

from kernels.moe import reference as moe
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

storage = sys.argv[1]
# gpt-oss with fewer experts, and Qwen3-MoE
gate, hidden_size, intermediate_size = moe.SILU, 2048, 768
if storage == "mxfp4":
    gate, hidden_size, intermediate_size = moe.Gate("clamped", 1.702, 7.0), 2880, 2880
problem = make_problem(
    num_tokens=1024, num_experts=4, top_k=4, hidden_size=hidden_size, intermediate_size=intermediate_size,
    dtype=torch.bfloat16, gate=gate, has_biases=storage == "mxfp4",
)
problem = pack_experts(problem, storage, block=128)
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
            top_k=4, renormalize=True, round_weights=True, gate=gate, biases=problem.biases, pdl=True,
        )
"""
FP8_SCRIPT = """
import sys

from kernels.moe.configs import fp8_configs
from kernels.moe.planes import to_planes
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

problem = make_problem(
    num_tokens=64, num_experts=4, top_k=4, hidden_size=2048, intermediate_size=768, dtype=torch.bfloat16,
)
problem = pack_experts(problem, sys.argv[1], block=128)
with collect_kernels() as kernels:
    for config in fp8_configs():
        fused_moe(
            problem.x, problem.logits, to_planes(problem.gate_up), to_planes(problem.down), config=config,
            top_k=4, renormalize=True, round_weights=True, pdl=True,
        )
"""
PAIRS_SCRIPT = """
import sys

from kernels.moe import triton_planes_pairs
from kernels.moe.configs import planes_config
from kernels.moe.planes import to_planes
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

triton_planes_pairs.has_ptx = lambda x, w: True  # though the tensors are on the CPU
storage, kind, num_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
problem = make_problem(
    num_tokens=num_tokens, num_experts=4, top_k=4, hidden_size=2048, intermediate_size=768, dtype=torch.bfloat16,
)
problem = pack_experts(problem, storage, block=128)
config = planes_config(kind, num_tokens=num_tokens, top_k=4, num_experts=32, can_round=True)
with collect_kernels() as kernels:
    fused_moe(
        problem.x, problem.logits, to_planes(problem.gate_up), to_planes(problem.down), config=config,
        top_k=4, renormalize=True, round_weights=True, pdl=True,
    )
"""
SHARE_SCRIPT = """
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.moe_problem import make_problem

problem = make_problem(
    num_tokens=64, num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, dtype=torch.bfloat16,
    has_biases=True, has_shared=True,
)
shares = [problem.of_experts(here) for here in (range(3), range(3, 5), range(5, 8))]
with collect_kernels() as kernels:
    for share in shares:
        for num_tokens in (1, 64):
            fused_moe(
                share.x[:num_tokens], share.logits[:num_tokens], share.gate_up, share.down, top_k=2, renormalize=True,
                round_weights=True, biases=share.biases, shared=share.shared[:num_tokens],
                first_expert=share.first_expert, pdl=True,
            )
"""
NAMES = {
    "_route_kernel",
    "_lay_out_kernel",
    "_grouped_kernel",
    "_combine_kernel",
    "_pairs_up_kernel",
    "_pairs_down_kernel",
}


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(
    ("storage", "arrangement"),
    [
        *((storage, "rows") for storage in ("mxfp4", "fp8", "fp8_rows", "nvfp4", "nf4")),
        *((storage, "planes") for storage in ("mxfp4", "fp8", "fp8_rows", "nvfp4", "nf4")),
    ],
)
def test_every_cut_of_packed_experts_compiles_and_fits(storage, arrangement, tmp_path):
    compiled = compile_kernels(SCRIPT, storage, arrangement, cache=tmp_path)
    names = {"_grouped_kernel", "_pairs_up_kernel", "_pairs_down_kernel"}
    assert {kernel.name for kernel in compiled} >= (names if arrangement == "rows" else {"_planes_kernel"})
    assert max(kernel.shared_bytes for kernel in compiled) <= HOPPER_SHARED_BYTES, compiled
    if arrangement == "planes" and storage in ("nvfp4", "nf4"):
        assert max(kernel.local_bytes for kernel in compiled) == 0, compiled
    if arrangement == "planes" and storage == "mxfp4":  # two programs are on a multiprocessor
        products = [kernel for kernel in compiled if kernel.name == "_planes_kernel"]
        assert max(kernel.registers for kernel in products) <= HOPPER_REGISTERS // 2, products


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("storage", ["fp8", "fp8_rows"])
def test_products_of_rounded_activations_run_on_the_tensor_cores_of_8_bits_and_spill_nothing(storage, tmp_path):
    compiled = compile_kernels(FP8_SCRIPT, storage, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name in ("_fp8_up_kernel", "_fp8_down_kernel")]
    assert len(products) == 4
    assert all(kernel.has_wgmma and kernel.has_wide_loads and kernel.local_bytes == 0 for kernel in products), products
    assert max(kernel.shared_bytes for kernel in products) <= HOPPER_SHARED_BYTES, products
    # of the narrower tiles two programs are on a multiprocessor
    assert sum(kernel.shared_bytes <= HOPPER_SHARED_BYTES // 2 for kernel in products) >= 2, products


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize(
    ("storage", "kind", "num_tokens"), [("fp8", "mxfp4", 1), ("mxfp4", "mxfp4", 1), ("nf4", "nf4", 2)]
)
def test_matrix_vector_products_of_planes_are_three_launches_with_wide_loads(storage, kind, num_tokens, tmp_path):
    compiled = compile_kernels(PAIRS_SCRIPT, storage, kind, str(num_tokens), cache=tmp_path)
    assert [kernel.name for kernel in compiled] == [
        "_route_kernel", "_planes_pairs_up_kernel", "_planes_pairs_down_kernel",
    ]  # fmt: skip
    assert all(kernel.has_wide_loads and kernel.local_bytes == 0 for kernel in compiled[1:]), compiled


@pytest.mark.full
@needs_triton
def test_ranks_of_unequal_shares_launch_the_same_kernels(tmp_path):
    """So that the other ranks find those that the first one compiled."""
    compiled = compile_kernels(SHARE_SCRIPT, cache=tmp_path)
    names = [kernel.name for kernel in compiled]
    assert {*names} == NAMES
    # routes with and without counts, and both products
    twice = ("_route_kernel", "_grouped_kernel")
    assert {name: names.count(name) for name in NAMES} == {name: 1 + (name in twice) for name in NAMES}
