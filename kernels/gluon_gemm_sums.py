# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""What becomes of a warpgroup's sums in gluon_gemm.py: handed over to another program, added up, stored."""

from __future__ import annotations

from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl


@jit
def part(outputs, program, acc, WHICH: gl.constexpr):
    """Where a program's 64 rows of sums stand. Scalar part first: what is left is a constant of each register."""
    _bias_ptr, _out_ptr, partial_ptr, _arrivals_ptr, _num_rows, _n = outputs
    BLOCK_N: gl.constexpr = acc.shape[1]
    lines = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
    return partial_ptr + (program * 32768 + WHICH * (64 * BLOCK_N)) + (lines[:, None] * BLOCK_N + columns[None, :])


@jit
def hand_over(acc, outputs, owner, WHICH: gl.constexpr):
    """Leave the sums to that program."""
    _bias_ptr, _out_ptr, _partial_ptr, arrivals_ptr, _num_rows, _n = outputs
    gl.store(part(outputs, gl.program_id(0), acc, WHICH), acc)
    gl.thread_barrier()
    gl.atomic_add(arrivals_ptr + owner * 4 + WHICH, 1, sem="release")


@jit
def await_parts(outputs, owner, WHICH: gl.constexpr, NUMBER: gl.constexpr):
    """Wait until so many other programs have left their sums, then make ready for the next launch."""
    _bias_ptr, _out_ptr, _partial_ptr, arrivals_ptr, _num_rows, _n = outputs
    arrivals = arrivals_ptr + owner * 4 + WHICH
    arrived = gl.atomic_add(arrivals, 0, sem="acquire")
    while arrived < NUMBER:
        arrived = gl.atomic_add(arrivals, 0, sem="acquire")
    gl.store(arrivals, 0)


@constexpr_function
def _line_layout(block_n):
    """Rows as wgmma's warps and lanes have them, but 8 columns in a thread: reached by shuffles within a quad."""
    columns = [[0, 1 << bit] for bit in range(block_n.bit_length() - 1)]
    registers = [*columns[:3], [8, 0], *columns[5:]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, block_n])


@jit
def store(
    acc, outputs, tile, num_row_tiles, CONSUMERS: gl.constexpr, HAS_BIAS: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """Add the bias and store, rounded to the output's dtype."""
    bias_ptr, out_ptr, _partial_ptr, _arrivals_ptr, num_rows, n = outputs
    BLOCK_N: gl.constexpr = acc.shape[1]
    first_row = (tile % num_row_tiles * CONSUMERS + WHICH) * 64
    first_feature = tile // num_row_tiles * BLOCK_N
    if HAS_BIAS:
        sources = first_feature + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias_ptr + sources, mask=sources < n, other=0.0).to(gl.float32)[None, :]
    LINES: gl.constexpr = _line_layout(BLOCK_N)
    lines = gl.arange(0, 64, gl.SliceLayout(1, LINES))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LINES))
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LINES)
    rows = out_ptr + (first_row * n + first_feature) + lines * n
    in_rows, in_features = first_row + lines < num_rows, first_feature + columns < n
    gl.store(rows[:, None] + columns[None, :], values, mask=in_rows[:, None] & in_features[None, :])
