"""All layers of one row in one kernel, compiled for Hopper without a GPU: what it needs to be fast, and not to hang."""

from pathlib import Path

import pytest

from tests.support.compiled_kernels import (
    HOPPER_REGISTERS,
    HOPPER_SHARED_BYTES,
    compile_kernels,
    needs_triton,
    run_script,
)

LAUNCH = """
from kernels.row_layers.gluon_layers import _MEASURED, RowScratch, row_layers


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


def launch(shape, num_layers):
    row_layers(
        zeros(1, shape.hidden), zeros(num_layers, 10, dtype=torch.int64), shape, zeros(4, 16, shape.num_kv_heads, 128),
        zeros(1, 80, dtype=torch.int32), zeros(1, dtype=torch.int32), zeros(1, dtype=torch.int64),
        zeros(1, dtype=torch.int64), zeros(100, 128), RowScratch.allocate(shape, torch.device("cpu")), scale=1.0,
        eps=1e-6, head_eps=1e-6, has_head_norms=True,
    )


with collect_kernels() as kernels:
    for shape in _MEASURED:
        for num_layers in (1, 16, 28):
            launch(shape, num_layers)
assert len(kernels) == len(_MEASURED), "one for any number of layers: a chosen layer loads what all need"
"""
WORDS = r"""
import re

for kernel in kernels:
    function = kernel.function
    source = function.ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    compiled = function.compile(source, target=target, options=dict(kernel.options))
    assert compiled.metadata.launch_cooperative_grid, "else programs might wait for others that never start"
    ptx = compiled.asm["ptx"]
    # A word is stored and loaded whole, and no waiting load comes from L1
    assert set(re.findall(r"ld\.relaxed\.\S+", ptx)) == {"ld.relaxed.gpu.global.v2.b32"}
    assert set(re.findall(r"st\.global\.wt\.\S+", ptx)) <= {"st.global.wt.b64", "st.global.wt.v2.b64"}
"""


@pytest.mark.full
@needs_triton
def test_layers_in_one_kernel_compile_and_hold_their_weights_in_registers(tmp_path: Path) -> None:
    for kernel in compile_kernels(LAUNCH, cache=tmp_path):
        assert kernel.name == "_layers_kernel"
        assert kernel.has_wide_loads
        assert kernel.local_bytes <= 128  # addresses, no weights
        assert kernel.registers <= HOPPER_REGISTERS
        assert kernel.shared_bytes <= HOPPER_SHARED_BYTES


@pytest.mark.full
@needs_triton
def test_words_are_whole_and_programs_start_together(tmp_path: Path) -> None:
    run_script(LAUNCH + WORDS, cache=tmp_path)
