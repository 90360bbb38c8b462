"""Products of few tokens compile for a Hopper GPU with every load in 16 bytes. Needs Triton's compiler, but no GPU."""

import pytest

from tests.support.compiled_kernels import HOPPER_REGISTERS, compile_kernels, needs_triton

SCRIPT = """
import sys

from kernels.moe.few_configs import few_config
from kernels.moe.planes import to_planes
from kernels.moe.reference import SILU, Gate
from kernels.moe.triton import fused_moe
from tests.unit.kernels.triton_cases.int_experts_problem import STORAGES, pack_integers
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

storage, kind, sizes, dtype = sys.argv[1:]
hidden_size, intermediate_size = map(int, sizes.split("x"))
top_k = 4 if storage == "mxfp4" else 8
is_clamped = storage == "mxfp4"
gate = Gate("clamped", alpha=1.702, limit=7.0) if is_clamped else SILU
problem = make_problem(
    num_tokens=16, num_experts=16, top_k=top_k, hidden_size=hidden_size, intermediate_size=intermediate_size,
    dtype=getattr(torch, dtype), has_biases=is_clamped, gate=gate,
)
if storage in STORAGES:
    problem = pack_integers(problem, STORAGES[storage])
else:
    problem = pack_experts(problem, storage, block=128)
gate_up, down = to_planes(problem.gate_up), to_planes(problem.down)
with collect_kernels() as kernels:
    for num_tokens, expert_bytes in ((1, 2**20), (1, 2**24), (2, 2**20), (16, 2**20)):
        config = few_config(
            kind, num_tokens=num_tokens, top_k=top_k, num_experts=16, num_here=16, hidden_size=hidden_size,
            intermediate_size=intermediate_size, expert_bytes=expert_bytes,
        )
        if config is None:  # other products serve
            continue
        fused_moe(
            problem.x[:num_tokens], problem.logits[:num_tokens], gate_up, down, config=config, biases=problem.biases,
            gate=gate, top_k=top_k, renormalize=True, round_weights=True, pdl=True,
        )
"""


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("sizes", ["2048x768", "4096x1408"])
@pytest.mark.parametrize(
    ("storage", "kind", "dtype"),
    [
        ("mxfp4", "mxfp4", "bfloat16"),
        ("nvfp4", "nvfp4", "bfloat16"),
        ("fp8", "fp8", "bfloat16"),
        *((name, "int4", "bfloat16") for name in ("awq", "gptq", "packed", "packed_asymmetric")),
        *((name, "int4", "float16") for name in ("awq", "packed")),
    ],
)
def test_codes_go_from_memory_to_registers_without_spills(storage, kind, dtype, sizes, tmp_path):
    compiled = compile_kernels(SCRIPT, storage, kind, sizes, dtype, cache=tmp_path)
    products = [kernel for kernel in compiled if kernel.name in ("_product_kernel", "_sum_kernel")]
    # of FP8, 2 tokens are served by other products, and with many inputs 1 is
    assert len(products) == ({"2048x768": 6, "4096x1408": 2}[sizes] if kind == "fp8" else 8)
    assert all(kernel.has_wide_loads and kernel.local_bytes == 0 for kernel in products), products
    # The sum of FP8 has six groups of twice the bytes in flight, which is faster than two programs a multiprocessor
    halves = [kernel for kernel in products if (kind, kernel.name) != ("fp8", "_sum_kernel")]
    assert all(kernel.registers <= HOPPER_REGISTERS // 2 for kernel in halves), products
    # of sums alone: values that went through it would take 16 KiB and more
    assert all(kernel.shared_bytes <= 4096 for kernel in products), products
