"""Every cut of the mixture of experts compiles for a Hopper GPU and fits it. Needs Triton's compiler, but no GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.moe_configs import grouped_config, grouped_configs, uses_pairs

SCRIPT = """
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

from kernels import triton_moe
from kernels.compile_ahead import collect_kernels
from kernels.moe_configs import grouped_configs, pairs_config

HIDDEN, INTER, EXPERTS = 512, 256, 8
configs = [*grouped_configs(), pairs_config(intermediate_size=256), pairs_config(intermediate_size=4096)]


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


with collect_kernels() as kernels:
    for config in configs:
        triton_moe.mix_experts(
            zeros(20, HIDDEN), zeros(20, EXPERTS + 1), zeros(EXPERTS, 2 * INTER, HIDDEN), zeros(EXPERTS, HIDDEN, INTER),
            top_k=2, renormalize=True, round_weights=True, shared=zeros(20, HIDDEN), config=config, pdl=True,
        )
for kernel in kernels:
    function = kernel.function
    source = function.ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    compiled = function.compile(source, target=target, options=dict(kernel.options))
    uses_tensor_cores = "wgmma.mma_async" in compiled.asm["ptx"]
    print(function.__name__, compiled.metadata.shared, uses_tensor_cores, flush=True)
"""
HOPPER_SHARED_BYTES = 227 * 1024


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_cut_compiles_for_hopper_and_fits_its_shared_memory(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    kernels = [line.split() for line in run.stdout.splitlines()]
    assert all(int(shared) <= HOPPER_SHARED_BYTES for _, shared, _ in kernels), run.stdout
    grouped = [uses_tensor_cores for name, _, uses_tensor_cores in kernels if name == "_grouped_kernel"]
    assert grouped == ["True"] * 2 * len(grouped_configs()), run.stdout
    assert sum(name == "_pairs_down_kernel" for name, _, _ in kernels) == 2


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8)])
def test_cuts_have_more_rows_the_more_tokens_there_are(num_experts: int, top_k: int) -> None:
    blocks = [
        grouped_config(num_pairs=num_tokens * top_k, num_experts=num_experts, itemsize=2).block_m
        for num_tokens in range(1, 8193)
    ]
    assert blocks == sorted(blocks)
    assert set(blocks) == {config.block_m for config in grouped_configs()}


def test_few_tokens_are_pairs_where_experts_are_many() -> None:
    def longest(num_experts: int, top_k: int) -> int:
        return sum(uses_pairs(num_tokens=n, top_k=top_k, num_experts=num_experts) for n in range(1, 100))

    assert longest(128, 8) == 4
    assert longest(60, 4) == 3
    assert longest(8, 2) == 1
    assert longest(4, 4) == 1
