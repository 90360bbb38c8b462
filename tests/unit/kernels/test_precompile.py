"""Kernels are noted instead of launched, and compiled by other processes. Needs Triton's compiler, but no GPU."""

from pathlib import Path

import pytest

from tests.support.compiled_kernels import needs_triton, run_script

SCRIPT = """
import triton

from kernels.elementwise import triton as elementwise_triton
from kernels.precompile import Compilation, keep_binaries_alone


def launch(size, *, pdl=False):
    x = torch.ones(3, size, dtype=torch.bfloat16)
    return elementwise_triton.rms_norm(x, x[0], 1e-6, pdl=pdl)


with collect_kernels() as kernels:
    outputs = [launch(64), launch(64, pdl=True), launch(96), launch(64)]
    assert torch.empty(5).sum() == 0
assert len(kernels) == 3
assert not any(output.any() for output in outputs)
assert triton.knobs.runtime.jit_cache_hook is None
with collect_kernels() as again:  # what was skipped once is no kernel afterwards
    launch(64)
    launch(64)
assert len(again) == 1

keep_binaries_alone()
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


@needs_triton
@pytest.mark.full
def test_what_was_noted_is_compiled_elsewhere_and_then_found_in_the_cache(tmp_path: Path) -> None:
    run = run_script(SCRIPT, cache=tmp_path)
    assert run.stderr.count("not compiled ahead") == 1
    kept = {path.suffix for path in tmp_path.rglob("_rms_norm*") if path.is_file()}
    assert kept <= {".cubin", ".json", ".source"}, "a start reads all of it"
