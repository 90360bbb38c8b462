# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""GEMM on Hopper, in Gluon, for the few products of 65 to 256 rows that cuBLAS was measured to be slower at: x @ w.T.

A program has a tile of 64 rows x block_n features. One warp loads by TMA, a ring of stages ahead; a warpgroup
multiplies. Under programmatic dependent launch the first weights are in shared memory before the wait for x: that is
most of what is saved, since such a product takes 5 to 10 us, and cuBLAS's kernels do not start early.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if not triton.__version__.startswith("3.6."):
    raise ImportError("Gluon changes between versions of Triton: this was written for 3.6")

BLOCK_M = BLOCK_K = 64
MIN_ROWS = 65  # below: kernels/triton_gemv.py
_LOADING_REGISTERS = gl.constexpr(24)
_TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(frozen=True)
class GemmCut:
    """The tile of a program and how it is loaded."""

    block_n: int
    num_stages: int

    @property
    def registers(self) -> int:
        """Of a thread at entry; what loads then leaves some to what multiplies. Few: another kernel starts beside."""
        return {32: 48, 64: 64, 128: 96, 256: 160}[self.block_n]


_NARROW, _MIDDLE, _WIDE, _WIDEST = GemmCut(32, 8), GemmCut(64, 8), GemmCut(128, 6), GemmCut(256, 4)
# (N, K) → (rows up to which it holds, cut, or None for cuBLAS), in order of rows; past the last: cuBLAS
_TABLE: dict[tuple[int, int], tuple[tuple[int, GemmCut | None], ...]] = {
    (4096, 1024): ((128, _MIDDLE), (256, _WIDE)),
    (1024, 2048): ((192, _NARROW), (256, _MIDDLE)),
    (6144, 1024): ((128, _WIDE), (192, None), (256, _WIDEST)),
    (1024, 3072): ((192, None), (256, _MIDDLE)),
}


def gemm_cut(x: torch.Tensor, w: torch.Tensor) -> GemmCut | None:
    """The cut for x @ w.T, or None: leave it to cuBLAS. Host-side facts only; the device is of capability 9.

    An exact table, since no rule held: of ten products measured at nine sizes (benchmarks/notes.md) these, Qwen3-0.6B's
    layers, were faster than cuBLAS after a norm at every measured size within the rows named; all larger ones were not.
    """
    num_rows = x.shape[0]
    for max_rows, cut in _TABLE.get((w.shape[0], w.shape[1]), ()):
        if MIN_ROWS <= num_rows <= max_rows:
            return cut if _is_readable(x, w) else None
    return None


def _is_readable(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether TMA and the tensor cores can."""
    return (
        x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and w.is_contiguous()
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and w.data_ptr() % 16 == 0
    )


def gemm(x: torch.Tensor, w: torch.Tensor, *, cut: GemmCut, pdl: bool = False) -> torch.Tensor:
    """Return x @ w.T, summed in fp32. x: [M, K]; w: [N, K]; N a multiple of cut.block_n, K of 64; [M, N]."""
    num_rows, k = x.shape
    n = w.shape[0]
    assert n % cut.block_n == 0
    assert k % BLOCK_K == 0
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    rows = TensorDescriptor(x, [num_rows, k], [x.stride(0), 1], [BLOCK_M, BLOCK_K], _TILE_LAYOUT)
    weights = TensorDescriptor(w, [n, k], [k, 1], [cut.block_n, BLOCK_K], _TILE_LAYOUT)
    # Row tiles first: those that read the same weights run at the same time
    _gemm_kernel[(triton.cdiv(num_rows, BLOCK_M), n // cut.block_n)](
        rows, weights, out, num_rows, n, k // BLOCK_K, STAGES=cut.num_stages, PDL=pdl,
        num_warps=4, launch_pdl=pdl, maxnreg=cut.registers,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["num_rows", "k_steps"])
def _gemm_kernel(x_desc, w_desc, out_ptr, num_rows, n, k_steps, STAGES: gl.constexpr, PDL: gl.constexpr):
    """One tile; part into the warps that multiply and the one that loads."""
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005
    ring = (x_tiles, w_tiles, _barriers(STAGES), _barriers(STAGES))
    gl.warp_specialize(
        [(_multiply, (ring, out_ptr, num_rows, n, k_steps)), (_load, (x_desc, w_desc, ring, k_steps, PDL))],
        [1], [_LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _barriers(NUMBER: gl.constexpr):
    """That many barriers in shared memory, each passed after one arrival."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def _grid_dependency(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION + " mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load(x_desc, w_desc, ring, k_steps, PDL: gl.constexpr):
    """Load both tiles of each K step into the ring; the first weights before the wait for x."""
    _x_tiles, w_tiles, _loaded, free = ring
    STAGES: gl.constexpr = w_tiles.shape[0]
    num_filled = gl.minimum(k_steps, STAGES)
    for step in range(num_filled):
        _load_weights(w_desc, ring, step, step)
    if PDL:
        _grid_dependency("griddepcontrol.wait;")
        _grid_dependency("griddepcontrol.launch_dependents;")
    for step in range(num_filled):
        _load_rows(x_desc, ring, step, step)
    for step in range(num_filled, k_steps):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES - 1) & 1)
        _load_weights(w_desc, ring, stage, step)
        _load_rows(x_desc, ring, stage, step)


@gluon.jit
def _load_weights(w_desc, ring, stage, step):
    """Begin a stage: say how much comes, and ask for the weights."""
    x_tiles, w_tiles, loaded, _free = ring
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    BLOCK_K: gl.constexpr = w_tiles.shape[2]
    mbarrier.expect(loaded.index(stage), (x_tiles.shape[1] + BLOCK_N) * BLOCK_K * 2)
    coordinates = [gl.program_id(1) * BLOCK_N, step * BLOCK_K]
    tma.async_copy_global_to_shared(w_desc, coordinates, loaded.index(stage), w_tiles.index(stage))


@gluon.jit
def _load_rows(x_desc, ring, stage, step):
    """Ask for the rows; those past the last are zeros."""
    x_tiles, _w_tiles, loaded, _free = ring
    coordinates = [gl.program_id(0) * x_tiles.shape[1], step * x_tiles.shape[2]]
    tma.async_copy_global_to_shared(x_desc, coordinates, loaded.index(stage), x_tiles.index(stage))


@gluon.jit
def _multiply(ring, out_ptr, num_rows, n, k_steps):
    """The warpgroup: one product is always under way while the next tiles are awaited."""
    x_tiles, w_tiles, loaded, free = ring
    STAGES: gl.constexpr = w_tiles.shape[0]
    BLOCK_M: gl.constexpr = x_tiles.shape[1]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    for step in range(k_steps):
        stage = step % STAGES
        mbarrier.wait(loaded.index(stage), step // STAGES & 1)
        w = w_tiles.index(stage).permute((1, 0))
        product = hopper.warpgroup_mma(x_tiles.index(stage), w, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, [product])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > 0)
    acc = hopper.warpgroup_mma_wait(0, [acc])
    LINES: gl.constexpr = _line_layout(BLOCK_N)
    rows = gl.program_id(0) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LINES))
    columns = gl.program_id(1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LINES))
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LINES)
    gl.store(out_ptr + (rows * n)[:, None] + columns[None, :], values, mask=(rows < num_rows)[:, None])


@constexpr_function
def _line_layout(block_n):
    """Rows as wgmma's warps and lanes have them, but 8 columns in a thread: reached by shuffles within a quad."""
    columns = [[0, 1 << bit] for bit in range(block_n.bit_length() - 1)]
    registers = [*columns[:3], [8, 0], *columns[5:]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, block_n])
