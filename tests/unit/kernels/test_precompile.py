"""Kernels are noted instead of launched, and compiled by other processes. Needs Triton's compiler, but no GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from types import SimpleNamespace

import torch
import triton
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

from kernels.elementwise import triton as elementwise_triton
from kernels.precompile import Compilation, collect_kernels


def launch(size, *, pdl=False):
    x = torch.ones(3, size, dtype=torch.bfloat16)
    return elementwise_triton.rms_norm(x, x[0], 1e-6, pdl=pdl)


with collect_kernels() as kernels:
    outputs = [launch(64), launch(64, pdl=True), launch(96), launch(64)]
    assert torch.empty(5).sum() == 0
assert len(kernels) == 3
assert not any(output.any() for output in outputs)
assert triton.knobs.runtime.jit_cache_hook is None

progress = []
assert Compilation(kernels).wait(lambda done, total: progress.append((done, total)))
assert progress[-1] == (3, 3)

hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
for kernel in kernels:
    kernel.compile(target)
assert hits == [True] * 3

kernels[0].constants[(0,)] = "nonsense"
kernels[0].signature["rows_ptr"] = "*nonsense"
with collect_kernels() as others:
    launch(32)
assert Compilation([*others, kernels[0]]).wait(lambda done, total: None) is False
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.full
def test_what_was_noted_is_compiled_elsewhere_and_then_found_in_the_cache(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stderr.count("not compiled ahead") == 1
