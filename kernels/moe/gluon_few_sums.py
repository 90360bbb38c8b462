"""Sums over all inputs of kernels/moe/gluon_few.py: where a program's rows are, and the order of loads and products."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.moe.gluon_few_codes import add_group, code_layout, half_layout, load_group, load_rows, mma_layout
from kernels.moe.planes import GROUP, PLANE

# ruff: noqa: ANN001, ANN201, ANN202, RUF005  (Triton reads annotations as types, and knows no * in tuples)

_GROUP = gl.constexpr(GROUP)
_PLANE = gl.constexpr(PLANE)


@jit
def load_ahead(source, SETTINGS: gl.constexpr):
    """Load the first AHEAD groups of each row: a tuple of what _load returns."""
    held = ()
    for step in gl.static_range(SETTINGS[4]):
        held = held + (_load(source, step, SETTINGS),)  # type: ignore[assignment]
    # The compiler would put most loads behind the products of the first; it moves none past a barrier
    gl.thread_barrier()
    return held


@jit
def _load(source, step, SETTINGS: gl.constexpr):
    """Load the words and scales of each row's group of a step, and those of the ups beside the gates."""
    word_ptrs, scale_ptrs, first_group, outputs, words_of_up, scales_of_up = source
    K: gl.constexpr = SETTINGS[0]
    KIND: gl.constexpr = SETTINGS[1]
    COLUMNS: gl.constexpr = SETTINGS[2]
    GROUPS: gl.constexpr = (K + _GROUP - 1) // _GROUP
    group = first_group + step * SETTINGS[3]
    words, scales = load_group(word_ptrs, scale_ptrs, group, GROUPS, outputs, KIND, COLUMNS)
    if SETTINGS[5] == 1:
        return words, scales
    else:
        ups, scales_of_ups = load_group(
            word_ptrs + words_of_up, scale_ptrs + scales_of_up, group, GROUPS, outputs, KIND, COLUMNS
        )  # fmt: skip
        return words, scales, ups, scales_of_ups


@jit
def sum_groups(held, source, rows, SETTINGS: gl.constexpr):
    """Sum over all groups, one set of outputs or two: [M, N] fp32 each. held: from load_ahead.

    rows: pointers of a plane of each column's row of x, [32, N], where its first group starts, [N], whether it has one.
    """
    K: gl.constexpr = SETTINGS[0]
    SPLITS: gl.constexpr = SETTINGS[3]
    AHEAD: gl.constexpr = SETTINGS[4]
    STEPS: gl.constexpr = (K + _GROUP * SPLITS - 1) // (_GROUP * SPLITS)
    M: gl.constexpr = source[0].shape[0]
    N: gl.constexpr = rows[0].shape[1]
    sums = gl.zeros([M, N], gl.float32, mma_layout(gl.num_warps()))
    ups = sums
    planes = _load_rows(rows, 0, SETTINGS)
    if STEPS <= AHEAD:
        for step in gl.static_range(STEPS):
            following = planes
            if step + 1 < STEPS:
                following = _load_rows(rows, step + 1, SETTINGS)
                gl.thread_barrier()
            sums, ups = _add(sums, ups, held[step], planes, SETTINGS)
            planes = following
    else:
        for first in range(0, STEPS, AHEAD):
            for place in gl.static_range(AHEAD):
                following = _load_rows(rows, first + place + 1, SETTINGS)
                gl.thread_barrier()
                sums, ups = _add(sums, ups, held[0], planes, SETTINGS)
                held = held[1:] + (_load(source, first + place + AHEAD, SETTINGS),)
                planes = following
    return sums, ups


@jit
def _load_rows(rows, step, SETTINGS: gl.constexpr):
    """Load the inputs of each column's group of a step, 0 past the last."""
    x_ptrs, starts, is_row = rows
    return load_rows(x_ptrs, starts + step * (SETTINGS[3] * _GROUP), is_row, SETTINGS[0])


@jit
def _add(sums, ups, loaded, planes, SETTINGS: gl.constexpr):
    """Add the products of what _load and _load_rows have returned for a step."""
    KIND: gl.constexpr = SETTINGS[1]
    COLUMNS: gl.constexpr = SETTINGS[2]
    sums = add_group(sums, loaded[0], loaded[1], planes, KIND, COLUMNS)
    if SETTINGS[5] == 2:
        ups = add_group(ups, loaded[2], loaded[3], planes, KIND, COLUMNS)
    return sums, ups


@jit
def place_rows(TILES: gl.constexpr, COMBINATIONS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the combination of each row of weights, and its output among those of the program."""
    rows = gl.arange(0, 16 * TILES, LAYOUT)
    return rows // 16 % COMBINATIONS, rows // (16 * COMBINATIONS) * 16 + rows % 16


@jit
def own_columns(sums, COMBINATIONS: gl.constexpr):
    """Sum over the columns of each row's own combination: [M, N] → [tiles, combinations, 16, columns of one]."""
    M: gl.constexpr = sums.shape[0]
    MEMBERS: gl.constexpr = sums.shape[1] // COMBINATIONS
    LAYOUT: gl.constexpr = sums.type.layout
    rows = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
    is_own = gl.expand_dims(rows // 16 % COMBINATIONS, 1) == gl.expand_dims(columns // MEMBERS, 0)
    own = gl.where(is_own, sums, 0.0)
    return gl.sum(own.reshape([M // (16 * COMBINATIONS), COMBINATIONS, 16, COMBINATIONS, MEMBERS]), 3)


@jit
def sources(words_ptr, scales_ptr, experts, features, n, stride_scales, SETTINGS: gl.constexpr, ROWS: gl.constexpr):
    """Return the first three and the last three of what _load reads. experts, features: of each row, [M], int64, int32.

    features: among the outputs of a matrix; those of ups are n further.
    """
    K: gl.constexpr = SETTINGS[0]
    KIND: gl.constexpr = SETTINGS[1]
    COLUMNS: gl.constexpr = SETTINGS[2]
    HALVES: gl.constexpr = SETTINGS[5]
    M: gl.constexpr = features.shape[0]
    LAYOUT: gl.constexpr = code_layout(M, gl.num_warps())
    GROUPS: gl.constexpr = (K + _GROUP - 1) // _GROUP
    RUNS: gl.constexpr = 2 if KIND == "fp8" else 1
    outputs = n * HALVES
    places = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    offsets = (experts * (GROUPS * RUNS) * outputs + features) * _PLANE
    word_ptrs = words_ptr + gl.expand_dims(offsets, 1) + gl.expand_dims(places, 0)
    scale_ptrs = scales_ptr + experts * stride_scales
    scales_of_up = n
    if KIND == "fp8":
        PER_OUTPUT: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
        scale_ptrs += features // ROWS * PER_OUTPUT
        scales_of_up = (n + ROWS - 1) // ROWS * PER_OUTPUT
    elif KIND == "nvfp4":
        HALF: gl.constexpr = gl.SliceLayout(2, half_layout(M, gl.num_warps()))
        scale_ptrs = gl.convert_layout(scale_ptrs + features * 2, gl.SliceLayout(1, HALF))
        scale_ptrs = gl.expand_dims(scale_ptrs, 1) + gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, HALF)), 0)
        scales_of_up = n * 2
    else:
        scale_ptrs += features
    return word_ptrs, scale_ptrs, outputs, n * _PLANE, scales_of_up
