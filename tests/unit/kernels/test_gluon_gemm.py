"""Which products take the GEMM of ours, and that its cuts compile for Hopper. The kernel itself: tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

gluon_gemm = pytest.importorskip("kernels.gluon_gemm", reason="needs triton 3.6", exc_type=ImportError)

W = torch.empty(1024, 2048, dtype=torch.bfloat16)


def _cut(num_rows, *, w=W, dtype=torch.bfloat16):
    return gluon_gemm.gemm_cut(torch.empty(num_rows, w.shape[1], dtype=dtype), w)


def test_a_measured_product_takes_the_cut_for_its_rows():
    narrow, middle = gluon_gemm.GemmCut(32, 8), gluon_gemm.GemmCut(64, 8)
    assert [_cut(rows) for rows in (64, 65, 192, 193, 256, 257)] == [None, narrow, narrow, middle, middle, None]
    gate_up = torch.empty(6144, 1024, dtype=torch.bfloat16)
    assert [_cut(rows, w=gate_up) is None for rows in (128, 129, 192, 193, 256)] == [False, True, True, False, False]


@pytest.mark.parametrize("shape", [(1024, 2049), (2048, 1024), (4096, 4096), (151936, 1024)])
def test_what_was_not_measured_or_not_faster_is_left_to_cublas(shape):
    assert _cut(128, w=torch.empty(shape, dtype=torch.bfloat16, device="meta")) is None


def test_what_tma_cannot_read_is_left_to_cublas():
    assert _cut(128) is not None
    assert _cut(128, dtype=torch.float16) is None
    assert _cut(128, w=W.float(), dtype=torch.float32) is None
    assert gluon_gemm.gemm_cut(torch.empty(2048, 128, dtype=torch.bfloat16).T, W) is None
    wide = torch.empty(128, 2056, dtype=torch.bfloat16)
    assert gluon_gemm.gemm_cut(wide[:, :2048], W) is not None
    assert gluon_gemm.gemm_cut(wide[:, 1:2049], W) is None
    assert gluon_gemm.gemm_cut(torch.empty(128, 2052, dtype=torch.bfloat16)[:, :2048], W) is None
    assert _cut(128, w=torch.empty(1024, 2056, dtype=torch.bfloat16)[:, :2048]) is None


def test_every_cut_of_the_table_divides_its_product():
    for (n, k), steps in gluon_gemm._TABLE.items():
        assert [rows for rows, _ in steps] == sorted(rows for rows, _ in steps)
        assert all(cut is None or n % cut.block_n == k % gluon_gemm.BLOCK_K == 0 for _, cut in steps)


COMPILE = """
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

from kernels.compile_ahead import Compilation, collect_kernels
from kernels.gluon_gemm import _TABLE, gemm

with collect_kernels() as kernels:
    for (n, k), steps in _TABLE.items():
        for rows, cut in steps:
            if cut is not None:
                x, w = torch.empty(rows, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
                gemm(x, w, cut=cut, pdl=True)
assert len(kernels) == len({cut for steps in _TABLE.values() for _, cut in steps if cut is not None})
assert Compilation(kernels).wait(lambda done, total: None)
"""


def test_every_cut_is_noted_and_compiled_ahead_for_hopper(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
