"""Compiles Triton kernels for a GPU that is not there, in a process of their own. Needs Triton's compiler.

A script launches kernels on CPU tensors inside `with collect_kernels() as kernels:`, which notes them instead. Its
process takes a device of some compute capability for the current one, `target`. The names imported below are there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

HOPPER_SHARED_BYTES = 227 * 1024
HOPPER_REGISTERS = 64 * 1024
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

_DEVICE = """
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

target = GPUTarget("cuda", {capability}, 32)
driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
        launcher_cls=lambda source, metadata: None,
    )
)
from kernels.precompile import collect_kernels
"""
_COMPILE = """
import json
import re
import subprocess
import tempfile

from triton import knobs


def usage_of(cubin):
    # of each thread: its registers, and the bytes to which they are spilled
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    spilled = re.findall(r"(?:STACK|LOCAL):(\\d+)", usage.stdout)
    return [max(map(int, found)) for found in (re.findall(r"REG:(\\d+)", usage.stdout), spilled)]


for kernel in kernels:
    function = kernel.function
    source = function.ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    compiled = function.compile(source, target=target, options=dict(kernel.options))
    assembly = compiled.asm["ptx"]
    has_wide_loads = "ld.global.v4.b32" in assembly or "cp.async.cg" in assembly
    facts = function.__name__, compiled.metadata.shared, "wgmma.mma_async" in assembly, has_wide_loads
    registers, local_bytes = usage_of(compiled.asm["cubin"])
    facts = *facts, local_bytes, registers * 32 * compiled.metadata.num_warps, assembly.count("mbarrier.init")
    started = assembly.partition("griddepcontrol.launch_dependents")[2].partition("barrier.sync")[0]
    in_shared_memory = re.search(r"wgmma.mma_async[^;]*}, %rd\\d+, %rd", assembly) is not None
    facts = *facts, started.count("bar.sync"), len(re.findall(r"cvt.(bf16.f16|rn.f16.s16)", assembly)), in_shared_memory
    facts = *facts, assembly.count("ld.shared.b8"), assembly.count("movmatrix.sync")
    facts = *facts, len(re.findall(r"mul\\.f16", assembly))
    print(json.dumps(facts), flush=True)
"""


class CompiledKernel(NamedTuple):
    """What was found of one kernel. has_wide_loads: some of its loads move 16 bytes. local_bytes: 0: nothing spills.

    registers: of a program's threads together; those of warp-specialised programs have more. num_barriers: in shared
    memory. start_barriers: of all threads, between the wait for the kernel before and the start of partitions.
    num_single_conversions: of float16 to bfloat16, or integers to float16: they are of the slowest instructions.
    has_shared_wgmma: some wgmma have both operands in shared memory. num_byte_loads: of single bytes from there.
    num_transposed: tiles of 8 x 8 that are transposed in registers. num_half_products: multiplications in float16.
    """

    name: str
    shared_bytes: int
    has_wgmma: bool
    has_wide_loads: bool
    local_bytes: int
    registers: int
    num_barriers: int
    start_barriers: int
    num_single_conversions: int
    has_shared_wgmma: bool
    num_byte_loads: int
    num_transposed: int
    num_half_products: int


def compile_kernels(script: str, *arguments: str, cache: Path, capability: int = 90) -> list[CompiledKernel]:
    """Compile what the script notes in `kernels`; fails the test if anything does not compile."""
    run = run_script(script + _COMPILE, *arguments, cache=cache, capability=capability)
    return [CompiledKernel(*json.loads(line)) for line in run.stdout.splitlines()]


def run_script(script: str, *arguments: str, cache: Path, capability: int = 90) -> subprocess.CompletedProcess[str]:
    """Run a script with such a device; fails the test if the script fails."""
    run = subprocess.run(
        [sys.executable, "-c", _DEVICE.format(capability=capability) + script, *arguments],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run
