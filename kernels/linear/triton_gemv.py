# ruff: noqa: ANN001, ANN202  (Triton reads annotations as types: kernel arguments carry none)
"""Skinny GEMM: x @ w.T for at most 64 rows of x, limited only by reading w once.

Each program streams BLOCK_N rows of w. If N alone gives too few programs to fill the device, K is split too, and the
last program to arrive sums the parts in order: deterministic, one launch. Under programmatic dependent launch a program
prefetches its weights into L2 before it waits for x, so that they are transferred while the previous kernel runs.

gated_gemv is the product of an MLP's gates and ups and the activation behind it in one launch: half of a program's rows
of w are of gates, the other half of the ups beside them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from kernels.attention.triton_common import prefetch_l2
from kernels.elementwise.triton import gated
from kernels.linear.splits import GEMV_SUMS, SplitKScratch
from kernels.linear.triton_split_k import store_split

MAX_ROWS = 64  # above, cuBLAS is as fast (benchmarks/notes.md)
_LINE = 64  # values of 16 bits in a line of L2
_WHOLE = 512  # columns: shapes whose K is a multiple have configs of their own
_MULTIPROCESSORS = 132
_MANY_OUTPUTS = 4 * 65535  # more tiles of four outputs than a grid takes
_SPLIT_N = 16 * _MULTIPROCESSORS  # outputs: four splits of tiles of 64 are no more than that


@dataclass(frozen=True)
class GemvConfig:
    """Tile sizes and number of splits for one shape. Splits are whole block_k, of which the last may lack some."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    uses_dot: bool = True  # tensor cores; False (one row only): fp32 multiply-adds
    prefetch: int = 256  # columns of each row of w that a program prefetches into L2 before it waits; 0: none
    block_m: int = 0  # rows of x per program; 0: all of them


def allocate_scratch(device: torch.device) -> SplitKScratch:
    """Allocate scratch for the splits (4 MB): enough for every config of gemv_config. One per stream."""
    return SplitKScratch.allocate(device, capacity=GEMV_SUMS)


def can_gemv(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if gemv supports this product: 16-bit, few rows, K in whole lines. Host-side facts only."""
    return (
        x.is_cuda
        and x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[0] <= MAX_ROWS
        and w.shape[1] % _LINE == 0
        and w.shape[1] >= 512
        and w.is_contiguous()
        and x.stride(-1) == 1
    )


def gemv_config(*, num_rows: int, n: int, k: int) -> GemvConfig:
    """Return the config of a shape class, tuned on an H100 (benchmarks/notes.md). k: a multiple of 64.

    Where a few programs more than multiprocessors would wait for a second turn, tiles are larger, or stages fewer, so
    that all of them run at once.
    """
    if k % _WHOLE != 0:
        return _ragged_config(num_rows, n, k)
    if num_rows == 1:
        return _one_row_config(n, k)
    if num_rows > 32:
        return _many_rows_config(n, k)
    if num_rows <= 8:
        return _few_rows_config(n, k)
    if n < 2048 and k % 1024 == 0:
        return GemvConfig(64, 128, 4, num_warps=4, num_stages=4 if k <= 2048 else 6, prefetch=512)
    return _some_rows_config(num_rows, n, k)


def fitting(config: GemvConfig, *, num_rows: int, shared_bytes: int) -> GemvConfig:
    """Reduce the stages of a config until it fits a GPU's shared memory; an H100 needs no reduction.

    shared_bytes: the limit of a block. Before Hopper, tiles in flight are one fewer than stages.
    """
    if not config.uses_dot:
        return config
    rows = config.block_m or max(8, triton.next_power_of_2(num_rows))
    tile_bytes = 2 * config.block_k * (config.block_n + rows)
    return replace(config, num_stages=min(config.num_stages, shared_bytes // tile_bytes + 1))


def _config_for(x: torch.Tensor, w: torch.Tensor) -> GemvConfig:
    config = gemv_config(num_rows=x.shape[0], n=w.shape[0], k=w.shape[1])
    return fitting(config, num_rows=x.shape[0], shared_bytes=shared_bytes_of(x.device)) if x.is_cuda else config


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Return the shared memory that Triton allows a block of that GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)["max_shared_mem"]


def _few_rows_config(n: int, k: int) -> GemvConfig:
    if n < 2048 and k % 1024 == 0:
        return GemvConfig(32, 256, 4, num_warps=4, num_stages=4, prefetch=512)
    if k < 4096:
        if 8192 <= n < 14336:
            return GemvConfig(64, 256, 1, num_warps=4, num_stages=3)
        return GemvConfig(64, 128, 1, 4, 6) if 14336 <= n < 17408 else GemvConfig(32, 256, 1, 4, 4)
    if n <= _SPLIT_N:
        return GemvConfig(64, 128, 4, num_warps=4, num_stages=8)
    if 6144 <= n < 8192:
        return GemvConfig(64, 128, 1, num_warps=4, num_stages=6, prefetch=0)
    return GemvConfig(32, 512, 1, num_warps=4, num_stages=5 if 3840 <= n <= 32 * _MULTIPROCESSORS else 3)


def _some_rows_config(num_rows: int, n: int, k: int) -> GemvConfig:
    splits = 2 if n < 6144 and k >= 4096 else 1
    is_crowded = _MULTIPROCESSORS < triton.cdiv(n, 64) * splits <= 2 * _MULTIPROCESSORS
    return GemvConfig(64, 128, splits, num_warps=4, num_stages=6 if not is_crowded else 5 if num_rows <= 16 else 4)


def _many_rows_config(n: int, k: int) -> GemvConfig:
    if n <= _SPLIT_N and k >= 4096:
        return GemvConfig(64, 256, 4, num_warps=4, num_stages=3)
    if n < 2048 and k % 1024 == 0:
        return GemvConfig(64, 128, 4, num_warps=4, num_stages=4)
    if n <= _SPLIT_N:
        return GemvConfig(16, 256, 1, num_warps=4, num_stages=5)
    if n < 6144 and k >= 4096:
        return GemvConfig(64, 128, 2, num_warps=4, num_stages=4 if n <= 32 * _MULTIPROCESSORS else 3)
    if n <= 64 * _MULTIPROCESSORS:
        return GemvConfig(64, 64, 1, num_warps=4, num_stages=8)
    if n <= 2 * 64 * _MULTIPROCESSORS or (n >= 65536 and k < 4096):
        return GemvConfig(64, 128, 1, num_warps=4, num_stages=3)
    if n <= 3 * 64 * _MULTIPROCESSORS:
        return GemvConfig(128, 64, 1, num_warps=8, num_stages=4)
    return GemvConfig(128, 128, 1, num_warps=8, num_stages=4)


def _one_row_config(n: int, k: int) -> GemvConfig:
    if n > _MANY_OUTPUTS:
        return GemvConfig(8, 1024 if k % 1024 == 0 else 512, 1, 4, num_stages=1, uses_dot=False, prefetch=512)
    if k % 1024 != 0:
        return GemvConfig(4, 512, 1, num_warps=2, num_stages=1, uses_dot=False, prefetch=2048 if k >= 2048 else 512)
    if k >= 4096:
        return GemvConfig(4, 1024, 1, num_warps=4, num_stages=1, uses_dot=False, prefetch=2048)
    if n >= 6144:
        return GemvConfig(4, 1024, 1, num_warps=4, num_stages=1, uses_dot=False, prefetch=1024)
    return GemvConfig(2, 1024, 1, num_warps=4, num_stages=1, uses_dot=False, prefetch=512)


def _ragged_config(num_rows: int, n: int, k: int) -> GemvConfig:
    """Return the config for K that is no multiple of 512, as gpt-oss's 2880: the last block of columns is masked."""
    if num_rows == 1:
        return GemvConfig(8 if n >= 4096 else 4, 512, 1, num_warps=4, num_stages=6, uses_dot=False, prefetch=512)
    if n <= 256 and k >= 2048:
        return GemvConfig(16, 256, 4, num_warps=4, num_stages=3)
    if num_rows > 32:
        return _many_rows_config(n, k)
    if n >= 2048:
        return _some_rows_config(num_rows, n, k)
    if k >= 2048:
        return GemvConfig(32, 128, 4, num_warps=4, num_stages=4)
    return GemvConfig(16, 256, 1, num_warps=4, num_stages=4)


def can_gate(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return True if gated_gemv supports these and is faster than a product and its activation. Host-side facts only.

    A layer of a chain was 1 to 4 % faster with 2 to 16 rows at K = 1024 and with 16 at 2048 and 4096; slower with 2 to
    8 rows at 2048, and with one (benchmarks/notes.md). More rows were not measured.
    """
    num_rows, (n, k) = x.shape[0], w.shape
    if not can_gemv(x, w) or not ((2 <= num_rows <= 8 and k <= 1024) or 8 < num_rows <= 16):
        return False
    return gemv_config(num_rows=num_rows, n=n, k=k).splits == 1


def gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scratch: SplitKScratch,
    *,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return x @ w.T + bias. x: [M, K], M <= 64; w: [N, K]; bias: [N]; one 16-bit dtype, fp32 accumulation; [M, N]."""
    out = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    config = config or _config_for(x, w)
    _launch(x, w, bias, out, scratch, config, gate="", pdl=pdl)
    return out


def gated_gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    scratch: SplitKScratch,
    *,
    is_gelu: bool,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return gate_and_mul(x @ w.T) of kernels/elementwise/triton.py, rounded where that rounds. w: [2 * I, K]; [M, I].

    config: as of gemv, without splits.
    """
    out = torch.empty(x.shape[0], w.shape[0] // 2, dtype=x.dtype, device=x.device)
    config = config or _config_for(x, w)
    assert config.splits == 1
    _launch(x, w, None, out, scratch, config, gate="gelu_tanh" if is_gelu else "silu", pdl=pdl)
    return out


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scratch: SplitKScratch,
    config: GemvConfig,
    *,
    gate: Literal["", "silu", "gelu_tanh"],
    pdl: bool,
) -> None:
    (num_rows, k), n = x.shape, out.shape[1]
    outputs = config.block_n if gate == "" else config.block_n // 2
    split_k = triton.cdiv(triton.cdiv(k, config.splits), config.block_k) * config.block_k
    num_tiles = triton.cdiv(n, outputs)
    m_pad = config.block_m or max(8, triton.next_power_of_2(num_rows)) if config.uses_dot else 1
    num_row_tiles = triton.cdiv(num_rows, m_pad)
    scratch.check(num_tiles=num_tiles * num_row_tiles, splits=config.splits, tile_sums=config.block_n * m_pad)
    # row tiles first: tiles that read the same weights run at the same time and share them in L2
    _gemv_kernel[(num_row_tiles, num_tiles, config.splits)](
        x, w, bias, out, scratch.partial, scratch.arrivals, num_rows, n, k, split_k, x.stride(0),
        M_PAD=m_pad, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        EVEN_N=n % outputs == 0, EVEN_K=split_k * config.splits == k,
        USES_DOT=config.uses_dot, HAS_BIAS=bias is not None, GATE=gate,
        STAGES=config.num_stages, PREFETCH=config.prefetch, PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _gemv_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, num_rows, n, k, split_k, stride_x,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, USES_DOT: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (tile of rows, tile of output features, split of K)."""
    row_tile = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    OUTPUTS: tl.constexpr = BLOCK_N if GATE == "" else BLOCK_N // 2
    places = tl.arange(0, BLOCK_N)
    features = tile * OUTPUTS + (places if GATE == "" else places % OUTPUTS)
    # A feature past the end reads the last one: cheaper in the loop than a mask
    sources = features if EVEN_N else tl.minimum(features, n - 1)
    if GATE != "":
        sources += places // OUTPUTS * n
    length = split_k if EVEN_K else tl.minimum(split_k, k - split * split_k)
    w_ptrs = w_ptr + sources.to(tl.int64) * k + split * split_k
    if PDL:
        # Programs after the first wave start when the wait is long over
        if PREFETCH > 0 and row_tile == 0 and tile * SPLITS + split < 528:
            _prefetch(w_ptrs, length, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = row_tile * M_PAD + tl.arange(0, M_PAD)
    if USES_DOT:
        x_ptrs = x_ptr + split * split_k + rows * stride_x
        acc = _dot_slab(x_ptrs, w_ptrs, rows < num_rows, length, M_PAD, BLOCK_N, BLOCK_K, EVEN_K, STAGES)
    else:
        acc = _fma_slab(x_ptr + split * split_k, w_ptrs, length, BLOCK_N, BLOCK_K, EVEN_K, STAGES)

    if GATE == "":
        outputs = out_ptr + rows[None, :] * n + features[:, None]
        mask = (rows < num_rows)[None, :] & (features < n)[:, None]
        store_split(
            acc, outputs, mask, partial_ptr, arrivals_ptr, bias_ptr, features, n, M_PAD, BLOCK_N, SPLITS, HAS_BIAS
        )  # fmt: skip
    else:
        halves = tl.permute(tl.reshape(acc.to(out_ptr.dtype.element_ty), [2, OUTPUTS, M_PAD]), (1, 2, 0))
        gate, up = tl.split(halves)
        columns = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        mask = (rows < num_rows)[None, :] & (columns < n)[:, None]
        product = gated(gate, up, GATE == "gelu_tanh").to(gate.dtype)
        tl.store(out_ptr + rows[None, :] * n + columns[:, None], product, mask=mask)


@triton.jit
def _dot_slab(
    x_ptrs, w_ptrs, in_rows, length,
    M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over this split of K as a product w @ x.T, so that w, not the few rows of x, is the wide side."""
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    for start in tl.range(0, length, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(w_ptrs[:, None] + columns[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptrs[:, None] + columns[None, :], mask=in_rows[:, None], other=0.0)
        else:
            in_k = (columns < length)[None, :]
            w = tl.load(w_ptrs[:, None] + columns[None, :], mask=in_k, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs[:, None] + columns[None, :], mask=in_rows[:, None] & in_k, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    return acc


@triton.jit
def _fma_slab(
    x_ptr, w_ptrs, length,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over this split of K for one row of x, reduced across threads once at the end. Returns [BLOCK_N, 1]."""
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, length, BLOCK_K, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(w_ptrs[:, None] + columns[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + columns)
        else:
            in_k = columns < length
            x = tl.load(x_ptr + columns, mask=in_k, other=0.0)
            w_tile = w_ptrs[:, None] + columns[None, :]
            w = tl.load(w_tile, mask=in_k[None, :], other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(acc, 1)[:, None]


@triton.jit
def _prefetch(w_ptrs, length, COLUMNS: tl.constexpr) -> None:
    """Prefetch the first COLUMNS of each row into L2, by 128-byte lines; past the end, the last line again."""
    lines = tl.minimum(tl.arange(0, COLUMNS // 64) * 64, length - 64)
    prefetch_l2(w_ptrs[:, None] + lines[None, :])
