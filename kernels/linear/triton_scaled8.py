# ruff: noqa: ANN001, ANN201  (Triton reads annotations as types: kernel arguments carry none)
"""x @ w.T of 8-bit values with scales, on the tensor cores of 8 bits: fp8 by block, and integers by row.

Twin of blocks_linear (kernels/linear/reference.py) and of int8_linear (kernels/linear/w8a8.py). By block, each block's
sum is scaled and added in fp32 (DeepSeek-V3, arXiv:2412.19437, §3.3.2); integers are summed as such and scaled once.

Few rows: w @ x.T, so that w fills the wide side; K is split until the device is full, and the parts are summed in order
by the last program of a tile. Where there are enough tiles with all of K: x @ w.T. The numbers are the same either way
but for the order of sums. x comes quantised: with programs that each did it, the best tiles took 1.02 to 4 times as
long on an H200. Needs e4m3 for fp8 (Ada, Hopper or later). Capturable in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention.triton_common import prefetch_l2
from kernels.linear.reference import MIN_SCALE
from kernels.linear.scaled8_configs import Scaled8Config
from kernels.linear.splits import SplitKScratch
from kernels.linear.triton_fp8 import larger, quotient, signals_first, wait_for_rows
from kernels.linear.triton_split_k import store_split
from kernels.linear.w8a8 import INT8_MAX

_INT8_MAX = tl.constexpr(INT8_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


def blocks_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    scratch: SplitKScratch, *, rows: int, columns: int, dtype: torch.dtype, config: Scaled8Config, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See kernels.linear.reference.blocks_linear; columns: a power of two of at least 32, config.block_k."""
    assert config.block_k == columns
    return _product(x, x_scales, w, w_scales, bias, scratch, rows, dtype, config, by_block=True, pdl=pdl)


def int8_linear(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    scratch: SplitKScratch, *, dtype: torch.dtype, config: Scaled8Config, pdl: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See kernels.linear.w8a8.int8_linear."""
    # a single scale is expanded to all rows
    scales = x_scales.contiguous()
    return _product(x, scales, w, w_scales, bias, scratch, 1, dtype, config, by_block=False, pdl=pdl)


def can_load_by_tma(x: torch.Tensor) -> bool:
    """Return True if a config with has_tma supports x, of 8 bits, and so a contiguous w. Host-side facts only."""
    return x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0


def _product(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, bias: torch.Tensor | None,
    scratch: SplitKScratch, rows_per_scale: int, dtype: torch.dtype, config: Scaled8Config,
    *, by_block: bool, pdl: bool,
) -> torch.Tensor:  # fmt: skip
    (num_rows, k), n = x.shape, w.shape[0]
    out = torch.empty(num_rows, n, dtype=dtype, device=x.device)
    num_steps = triton.cdiv(k, config.block_k)
    row_tiles, tiles = triton.cdiv(num_rows, config.block_m), triton.cdiv(n, config.block_n)
    sizes = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "EVEN_K": k % config.block_k == 0}
    kind = {"BY_BLOCK": by_block, "HAS_BIAS": bias is not None}
    if not config.is_few:
        sources: tuple[object, object] = (x, w)
        if config.has_tma:
            assert can_load_by_tma(x)
            sources = tuple(
                TensorDescriptor(each, list(each.shape), list(each.stride()), [block, config.block_k])
                for each, block in ((x, config.block_m), (w, config.block_n))
            )
        _tiled_kernel[(row_tiles * tiles,)](
            *sources, x_scales, w_scales, bias, out, num_rows, n, k, rows_per_scale, num_steps, x.stride(0),
            BLOCK_M=config.block_m, **sizes, **kind, ONE_SCALE=rows_per_scale % config.block_n == 0,
            STAGES=config.num_stages, GROUP=config.group, HAS_TMA=config.has_tma, PDL=pdl,
            num_warps=config.num_warps, launch_pdl=pdl,
        )  # fmt: skip
        return out
    scratch.check(num_tiles=row_tiles * tiles, splits=config.splits, tile_sums=config.block_m * config.block_n)
    # row tiles first: tiles that read the same weights run at the same time and share them in L2
    _few_rows_kernel[(row_tiles, tiles, config.splits)](
        x, x_scales, w, w_scales, bias, out, scratch.partial, scratch.arrivals, num_rows, n, k, rows_per_scale,
        num_steps, triton.cdiv(num_steps, config.splits), x.stride(0),
        M_PAD=config.block_m, **sizes, **kind, SPLITS=config.splits, STAGES=config.num_stages,
        PREFETCH=k % 512 == 0, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_steps", "steps_per_split"])
def _few_rows_kernel(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, num_rows, n, k,
    rows_per_scale, num_steps, steps_per_split, stride_x,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, BY_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of outputs, split of K)."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    sources = tl.minimum(outputs, n - 1)  # past the end the last one again: cheaper in the loop than a mask
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, num_steps)
    w_ptrs = w_ptr + sources.to(tl.int64)[:, None] * k
    if PDL:
        # Programs after the first wave start when the wait is long over
        if PREFETCH and row_tile == 0 and tile * SPLITS + split < 528:
            lines = tl.minimum(first * BLOCK_K + tl.arange(0, 4) * 128, k - 128)
            prefetch_l2(w_ptrs + lines[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = row_tile * M_PAD + tl.arange(0, M_PAD)
    in_rows = rows < num_rows
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32 if BY_BLOCK else tl.int32)
    for step in tl.range(first, last, num_stages=STAGES):
        columns = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(w_ptrs + columns[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptrs + columns[None, :], mask=in_rows[:, None], other=0.0)
        else:
            in_k = (columns < k)[None, :]
            w = tl.load(w_ptrs + columns[None, :], mask=in_k, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + columns[None, :], mask=in_rows[:, None] & in_k, other=0.0)
        if BY_BLOCK:
            w_scale = tl.load(w_scales_ptr + sources // rows_per_scale * num_steps + step)
            x_scale = tl.load(x_scales_ptr + rows * num_steps + step, mask=in_rows, other=0.0)
            acc += tl.dot(w, tl.trans(x)) * w_scale[:, None] * x_scale[None, :]
        else:
            acc = tl.dot(w, tl.trans(x), acc, out_dtype=tl.int32)
    if not BY_BLOCK:
        x_scale = tl.load(x_scales_ptr + rows, mask=in_rows, other=0.0)
        acc = acc.to(tl.float32) * tl.load(w_scales_ptr + sources)[:, None] * x_scale[None, :]
    results = out_ptr + rows.to(tl.int64)[None, :] * n + outputs[:, None]
    mask = in_rows[None, :] & (outputs < n)[:, None]
    store_split(
        acc, results, mask, partial_ptr, arrivals_ptr, bias_ptr, outputs, n, M_PAD, BLOCK_N, SPLITS, HAS_BIAS
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _tiled_kernel(
    x_source, w_source, x_scales_ptr, w_scales_ptr, bias_ptr, out_ptr, num_rows, n, k, rows_per_scale,
    num_steps, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, BY_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ONE_SCALE: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    HAS_TMA: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of x @ w.T; GROUP tiles of rows run side by side and share weights. ONE_SCALE: of a step's weights.

    HAS_TMA: the sources are tensor descriptors, else pointers.
    """
    row_tiles, tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first_tile = tl.program_id(0) // (GROUP * tiles) * GROUP
    height = tl.minimum(row_tiles - first_tile, GROUP)
    place = tl.program_id(0) % (GROUP * tiles)
    rows_start = (first_tile + place % height) * BLOCK_M
    rows = rows_start + tl.arange(0, BLOCK_M)
    tile = place // height
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_rows, w_rows = tl.minimum(rows, num_rows - 1), tl.minimum(outputs, n - 1)
    x_ptrs = None if HAS_TMA else x_source + x_rows.to(tl.int64)[:, None] * stride_x
    w_ptrs = None if HAS_TMA else w_source + w_rows.to(tl.int64)[None, :] * k
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if BY_BLOCK else tl.int32)
    for step in tl.range(0, num_steps, num_stages=STAGES):
        columns = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if HAS_TMA:
            x = x_source.load([rows_start, step * BLOCK_K])
            w = tl.trans(w_source.load([tile * BLOCK_N, step * BLOCK_K]))
        elif EVEN_K:
            x = tl.load(x_ptrs + columns[None, :])
            w = tl.load(w_ptrs + columns[:, None])
        else:
            x = tl.load(x_ptrs + columns[None, :], mask=(columns < k)[None, :], other=0.0)
            w = tl.load(w_ptrs + columns[:, None], mask=(columns < k)[:, None], other=0.0)
        if BY_BLOCK:
            x_scale = tl.load(x_scales_ptr + x_rows * num_steps + step)
            if ONE_SCALE:
                w_scale = tl.load(w_scales_ptr + tile * BLOCK_N // rows_per_scale * num_steps + step)
                acc += tl.dot(x, w) * (x_scale * w_scale)[:, None]
            else:
                w_scale = tl.load(w_scales_ptr + w_rows // rows_per_scale * num_steps + step)
                acc += tl.dot(x, w) * x_scale[:, None] * w_scale[None, :]
        else:
            acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    if BY_BLOCK:
        sums = acc
    else:
        sums = acc.to(tl.float32) * tl.load(x_scales_ptr + x_rows)[:, None] * tl.load(w_scales_ptr + w_rows)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    results = out_ptr + rows.to(tl.int64)[:, None] * n + outputs[None, :]
    tl.store(results, sums.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & (outputs < n)[None, :])


def quantize_rows_int8(x: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.linear.w8a8.quantize_rows_int8."""
    num_rows, k = x.shape
    values = torch.empty(num_rows, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k) if k <= 4096 else 2048
    _quantize_rows_int8_kernel[(num_rows,)](
        x, None, values, scales, k, x.stride(0), BLOCK=block, IS_KNOWN=False, PDL=pdl,
        EARLY=signals_first(x, k), num_warps=16 if block > 1024 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return values, scales


def quantize_by_int8(x: torch.Tensor, scale: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.linear.w8a8.quantize_by_int8."""
    num_rows, k = x.shape
    values = torch.empty(num_rows, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    _quantize_rows_int8_kernel[(num_rows,)](
        x, scale, values, scales, k, x.stride(0), BLOCK=min(triton.next_power_of_2(k), 2048), IS_KNOWN=True, PDL=pdl,
        EARLY=signals_first(x, k), num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return values, scales


@triton.jit
def _quantize_rows_int8_kernel(
    x_ptr, scale_ptr, values_ptr, scales_ptr, k, stride_x,
    BLOCK: tl.constexpr, IS_KNOWN: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row, read twice unless its scale is known: from memory, then from cache."""
    if PDL:
        wait_for_rows(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if IS_KNOWN:
        scale = tl.load(scale_ptr)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, k, BLOCK):
            x = tl.load(x_ptr + row * stride_x + start + columns, mask=start + columns < k, other=0.0)
            largest = larger(largest, tl.abs(x.to(tl.float32)))
        scale = int8_scale_of(tl.reduce(largest, 0, larger))
    for start in range(0, k, BLOCK):
        mask = start + columns < k
        x = tl.load(x_ptr + row * stride_x + start + columns, mask=mask, other=0.0).to(tl.float32)
        scaled = tl.div_rn(x, scale) if IS_KNOWN else quotient(x, scale)
        tl.store(values_ptr + row * k + start + columns, to_int8(scaled), mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit
def int8_scale_of(largest):
    """Return the scale at which integers reach `largest`."""
    return larger(tl.div_rn(largest, _INT8_MAX), _MIN_SCALE)


@triton.jit
def to_int8(scaled):
    """Quotients rounded to integers; what is beyond their range saturates, and what NaN becomes has no meaning."""
    scaled = tl.clamp(scaled, -_INT8_MAX, _INT8_MAX)
    # Adding 1.5 * 2 ** 23 leaves no bits for a fraction: rounds to the nearest, and to even ones between two
    rounded = (scaled + 12582912.0) - 12582912.0
    return tl.where(rounded == rounded, rounded, 0.0).to(tl.int8)
