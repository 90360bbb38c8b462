"""Sums over ranks, compiled for Hopper without a GPU: one kernel for all ranks and row counts, in 16-byte vectors."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import re
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

from kernels.precompile import collect_kernels
from kernels.all_reduce.triton import TritonOneShotAllReduce

NUM_RANKS, WIDTH = 4, 1024
inboxes = [torch.empty(64, dtype=torch.int16) for _ in range(NUM_RANKS)]
weight = torch.ones(WIDTH, dtype=torch.bfloat16)
with collect_kernels() as kernels:
    for rank in range(NUM_RANKS):
        sums = TritonOneShotAllReduce(
            inboxes, memory=None, rank=rank, width=WIDTH, num_programs=132, device=torch.device("cpu"), pdl=True
        )
        for rows in (1, 2, 16, 33, 256):
            x = torch.ones(rows, WIDTH, dtype=torch.bfloat16)
            sums.add_rms_norm(x, x.clone(), weight, 1e-6)
            sums.all_reduce(x)
assert len(kernels) == 2, "one with the norm, one without"
for kernel in kernels:
    function = kernel.function
    source = function.ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    compiled = function.compile(source, target=target, options=dict(kernel.options))
    ptx = compiled.asm["ptx"]
    sent = re.findall(r"st\\.global\\.wt\\.\\S+", ptx)
    received = re.findall(r"ld\\.volatile\\.global\\.\\S+", ptx)
    assert sent == ["st.global.wt.v4.b32"] * NUM_RANKS, sent
    assert received == ["ld.volatile.global.v4.b32"] * NUM_RANKS, received
    assert ptx.rindex("__assertfail") > ptx.rindex("ld.volatile"), "the bound is checked behind the loop"
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents") < ptx.index(sent[0])
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.full
def test_all_ranks_and_row_counts_share_a_kernel_that_moves_16_bytes_at_once(tmp_path: Path) -> None:
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
