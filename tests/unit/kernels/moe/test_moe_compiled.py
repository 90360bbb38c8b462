"""Mixtures of every storage compile for a Hopper GPU and fit it. Needs Triton's compiler, but no GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

target = GPUTarget("cuda", 90, 32)
driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
        launcher_cls=lambda source, metadata: None,
    )
)

from kernels.moe import reference as moe
from kernels.moe.triton import fused_moe
from kernels.precompile import collect_kernels
from tests.unit.kernels.triton_cases.moe_problem import make_problem, pack_experts

storage = sys.argv[1]
# gpt-oss with fewer experts, and Qwen3-MoE
gate, hidden_size, intermediate_size = {
    "mxfp4": (moe.Gate("clamped", 1.702, 7.0), 2880, 2880), "fp8": (moe.SILU, 2048, 768)
}[storage]
problem = make_problem(
    num_tokens=1024, num_experts=4, top_k=4, hidden_size=hidden_size, intermediate_size=intermediate_size,
    dtype=torch.bfloat16, gate=gate, has_biases=storage == "mxfp4",
)
problem = pack_experts(problem, storage, block=128)
with collect_kernels() as kernels:
    for num_tokens in (1, 4, 16, 64, 1024):
        fused_moe(
            problem.x[:num_tokens], problem.logits[:num_tokens], problem.gate_up, problem.down,
            top_k=4, renormalize=True, round_weights=True, gate=gate, biases=problem.biases, pdl=True,
        )
for kernel in kernels:
    function = kernel.function
    source = function.ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    compiled = function.compile(source, target=target, options=dict(kernel.options))
    print(function.__name__, compiled.metadata.shared, flush=True)
"""
SHARED_BYTES = 227 * 1024


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("storage", ["mxfp4", "fp8"])
def test_every_cut_of_packed_experts_compiles_and_fits(storage, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, storage],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    compiled = [line.split() for line in run.stdout.splitlines()]
    assert {name for name, _ in compiled} >= {"_grouped_kernel", "_pairs_up_kernel", "_pairs_down_kernel"}
    assert max(int(shared) for _, shared in compiled) <= SHARED_BYTES, compiled
