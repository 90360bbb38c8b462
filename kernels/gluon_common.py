"""Parts that the Gluon kernels for Hopper share: barriers of their warps, and the order after the kernel before.

Imports triton at once; only modules that already need its Gluon import this one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types)


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate NUMBER barriers in shared memory, each passed after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def skip_stages(loaded, free, done, num_steps, STAGES: gl.constexpr):
    """Pass num_steps stages of a ring unused, once each is loaded. done: steps before; returns those after."""
    for _step in range(num_steps):
        mbarrier.wait(loaded.index(done % STAGES), (done // STAGES) & 1)
        mbarrier.arrive(free.index(done % STAGES))
        done += 1
    return done


@gluon.jit
def grid_dependency(INSTRUCTION: gl.constexpr):
    """Run griddepcontrol.wait or .launch_dependents of PTX, as Triton's gdc_wait() and gdc_launch_dependents() do."""
    gl.inline_asm_elementwise(INSTRUCTION + " mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
