"""Mamba-2's kernels compile for a Hopper GPU, fit it and use its tensor cores. Needs Triton's compiler, but no GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json
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

from kernels.mamba2.triton import mamba2
from kernels.mamba2.triton_elementwise import grouped_gated_norm, mamba2_dt
from kernels.precompile import collect_kernels
from kernels.states import StateMetadata, StateView


def launch(num_tokens, num_rows, max_query_len):
    width = num_heads * head_dim
    channels = torch.zeros(num_tokens, width + 2 * num_groups * state_size, dtype=dtype)
    x, b, c = channels.split([width, num_groups * state_size, num_groups * state_size], dim=1)
    view = StateView(torch.zeros(4, 3, 16 * state_size), 0, width, state_size)
    numbers = torch.zeros(num_rows + 1, dtype=torch.int32)
    pages = torch.zeros(num_rows, 99, dtype=torch.int32)
    metadata = StateMetadata(numbers, numbers[:-1], numbers[:-1].long(), pages, None, max_query_len, None)
    dt = mamba2_dt(channels[:, :num_heads], torch.zeros(num_heads, dtype=dtype), (0.0, 1.0), pdl=True)
    b, c = (vectors.unflatten(1, (num_groups, state_size)) for vectors in (b, c))
    y = mamba2(x.unflatten(1, (num_heads, head_dim)), b, c, dt, dt[0], dt[0], view, metadata, pdl=True)
    y, z = y.flatten(1), channels[:, :width]
    for weight in (torch.zeros(width, dtype=dtype), None):
        grouped_gated_norm(y, z, weight, 1e-5, group_size=width // num_groups, pdl=True)
    grouped_gated_norm(
        y, z, torch.zeros(width), 1e-5, group_size=2 * width, has_norm_first=True, all_reduce=lambda x: x, pdl=True
    )


num_heads, head_dim, state_size, num_groups = map(int, sys.argv[2:])
dtype = getattr(torch, sys.argv[1])
with collect_kernels() as kernels:
    launch(8192, 4, 8192)
    launch(256, 256, 1)
for kernel in kernels:
    function = kernel.function
    source = function.ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    compiled = function.compile(source, target=target, options=dict(kernel.options))
    assembly = compiled.asm["ptx"]
    facts = {"name": function.__name__, "shared": compiled.metadata.shared, "wgmma": "wgmma.mma_async" in assembly,
             "wide": "ld.global.v4.b32" in assembly or "cp.async.cg" in assembly}
    print(json.dumps(facts), flush=True)
"""
SHARED_BYTES = 227 * 1024


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "sizes", ["bfloat16 64 64 128 8", "bfloat16 128 64 128 1", "bfloat16 32 128 256 2", "float32 64 64 128 8"]
)
def test_the_shapes_of_published_models_compile_and_fit(sizes, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *sizes.split()],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {kernel["name"] for kernel in kernels} == {
        "_dt_kernel", "_gated_norm_kernel", "_pass_states_kernel", "_segments_kernel", "_step_kernel",
    }  # fmt: skip
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_BYTES
    for kernel in kernels:
        if kernel["name"] in ("_segments_kernel", "_step_kernel"):
            assert kernel["wide"], kernel
        if kernel["name"] == "_segments_kernel":
            assert kernel["wgmma"] == sizes.startswith("bfloat16"), kernel
