"""Sums over ranks, compiled without a GPU: one kernel for all ranks and row counts, in 16-byte vectors.

Its stores to peers are st.global.wt, for which PTX promises less than the kernel needs: here, that ptxas makes of them
the instruction that it makes of st.relaxed.sys.
"""

from pathlib import Path

import pytest

from tests.support.compiled_kernels import needs_triton, run_script

SCRIPT = r"""
import re
import subprocess
import sys
from pathlib import Path

import triton.backends.nvidia

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
    sent = re.findall(r"st\.global\.wt\.\S+", ptx)
    received = re.findall(r"ld\.volatile\.global\.\S+", ptx)
    assert sent == ["st.global.wt.v4.b32"] * NUM_RANKS, sent
    assert received == ["ld.volatile.global.v4.b32"] * NUM_RANKS, received
    assert ptx.rindex("__assertfail") > ptx.rindex("ld.volatile"), "the bound is checked behind the loop"
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents") < ptx.index(sent[0])

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
FOLDER = Path(sys.argv[1])


def memory_instructions(cubin):
    path = FOLDER / "kernel.cubin"
    path.write_bytes(cubin)
    listing = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\b(?:LD|ST)G?\.E\S*", listing)


def assembled(instruction, capability):
    text = f'''.version {8.7 if capability >= 100 else 8.3}
        .target sm_{capability}
        .address_size 64
        .visible .entry k(.param .u64 to) {{
        .reg .b64 %d; .reg .b32 %r; mov.u32 %r, %clock; ld.param.u64 %d, [to];
        {instruction} [%d], {{%r, %r, %r, %r}}; ret; }}'''
    (FOLDER / "kernel.ptx").write_text(text)
    ptxas = TOOLS / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    run = [ptxas, f"-arch=sm_{capability}", FOLDER / "kernel.ptx", "-o", FOLDER / "kernel.cubin"]
    subprocess.run(run, check=True)
    (found,) = memory_instructions((FOLDER / "kernel.cubin").read_bytes())
    return found


for capability in (80, 90, 100):
    relaxed = assembled("st.relaxed.sys.global.v4.b32", capability)
    assert relaxed == "STG.E.128.STRONG.SYS" != assembled("st.global.v4.b32", capability), relaxed
    for kernel in kernels:
        function, constants = kernel.function, dict(kernel.constants)
        if capability < 90:  # no kernel launches early there
            constants[next(key for key in constants if function.arg_names[key[0]] == "PDL")] = False
        source = function.ASTSource(function, kernel.signature, constants, kernel.attributes)
        options = {**kernel.options, "launch_pdl": capability >= 90}
        compiled = function.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        found = memory_instructions(compiled.asm["cubin"])
        assert found.count(relaxed) == NUM_RANKS, (capability, found)
        assert [name for name in found if name.startswith("LD") and name.endswith("STRONG.SYS")] == [
            "LDG.E.128.STRONG.SYS"
        ] * NUM_RANKS, (capability, found)
"""


@needs_triton
@pytest.mark.full
def test_all_ranks_and_row_counts_share_a_kernel_that_moves_16_bytes_at_once_and_to_the_system(tmp_path: Path) -> None:
    run_script(SCRIPT, str(tmp_path), cache=tmp_path)
