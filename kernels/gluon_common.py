"""Parts that the Gluon kernels for Hopper share: barriers, the order of tiles, and that after the kernel before.

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
def place_of_tile(tile, row_tiles, tiles, GROUP: gl.constexpr):
    """Return the tile's place among those of rows, and of outputs: GROUP tiles of rows side by side share weights."""
    first = tile // (GROUP * tiles) * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    place = tile % (GROUP * tiles)
    return first + place % height, place // height


@gluon.jit
def grid_dependency(INSTRUCTION: gl.constexpr):
    """Run griddepcontrol.wait or .launch_dependents of PTX, as Triton's gdc_wait() and gdc_launch_dependents() do."""
    gl.inline_asm_elementwise(INSTRUCTION + " mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
