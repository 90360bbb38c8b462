"""load_tile: a tile of an ExpertMatrix as values, whatever its storage. Triton twin of kernels/moe/storage.py.

Hopper has no FP4 units: codes become floats in registers, by arithmetic, and the product is that of 16-bit values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.moe.storage import MXFP4_BLOCK, ExpertMatrix, Fp8Matrix, Mxfp4Matrix

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)


@dataclass(frozen=True)
class StoredTensors:
    """The arguments that kernels take of an ExpertMatrix."""

    values: torch.Tensor
    scales: torch.Tensor | None
    storage: str  # "dense", "mxfp4", "fp8", or "fp8_bytes": for GPUs on which Triton has no e4m3
    rows: int = 1  # outputs and inputs that share a scale
    columns: int = 1

    @classmethod
    def of(cls, matrix: ExpertMatrix) -> StoredTensors:
        """Take a matrix apart, whose tensors must be contiguous."""
        if isinstance(matrix, Mxfp4Matrix):
            stored = cls(matrix.blocks, matrix.scales, "mxfp4", 1, MXFP4_BLOCK)
        elif isinstance(matrix, Fp8Matrix):
            has_fp8 = has_fp8_loads(matrix.values.device)
            values = matrix.values if has_fp8 else matrix.values.view(torch.uint8)
            stored = cls(values, matrix.scales, "fp8" if has_fp8 else "fp8_bytes", matrix.rows, matrix.columns)
        else:
            stored = cls(matrix, None, "dense")
        assert stored.values.is_contiguous()
        assert stored.scales is None or stored.scales.is_contiguous()
        return stored


@functools.cache
def has_fp8_loads(device: torch.device) -> bool:
    """Return True if Triton has the type e4m3 on the device: from compute capability 8.9 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def load_tile(
    w_ptr, scales_ptr, half, n, k, features, start, dtype: tl.constexpr,
    STORAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    STREAMS: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_N, BLOCK_K] of dtype: inputs start … of `features`, 0 past the end.

    half: index of the matrix [n, k] among all experts' halves, int64; features < n. BLOCK_K divides start, and divides
    COLUMNS or is a multiple of it. STREAMS: each weight is read once and need not stay in L2.
    """
    policy: tl.constexpr = "evict_first" if STREAMS else ""
    rows = half * n + features
    if STORAGE == "mxfp4":
        places = start // 2 + tl.arange(0, BLOCK_K // 2)
        ptrs = w_ptr + rows[:, None] * (k // 2) + places[None, :]
        packed = _load(ptrs, places, k // 2, EVEN_K, policy).to(tl.int32)
        values = tl.interleave(_e2m1(packed, 0), _e2m1(packed, 4))
    else:
        places = start + tl.arange(0, BLOCK_K)
        values = _load(w_ptr + rows[:, None] * k + places[None, :], places, k, EVEN_K, policy)
        if STORAGE == "fp8_bytes":
            values = _e4m3(values.to(tl.int32))
    if STORAGE != "dense":
        run: tl.constexpr = min(BLOCK_K, COLUMNS)
        count: tl.constexpr = BLOCK_K // run
        groups = (start + tl.arange(0, count) * run) // COLUMNS
        num_groups = tl.cdiv(k, COLUMNS)
        scale_rows = half * tl.cdiv(n, ROWS) + features // ROWS
        scales = _load(
            scales_ptr + scale_rows[:, None] * num_groups + groups[None, :], groups, num_groups, EVEN_K, policy
        )
        if STORAGE == "mxfp4":
            scales = _e8m0(scales)
        spread = tl.broadcast_to(scales[:, :, None], [values.shape[0], count, run])
        values = values.to(tl.float32) * tl.reshape(spread, [values.shape[0], BLOCK_K])
    return values.to(dtype)


@triton.jit
def _load(ptrs, places, end, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """Load the columns `places` of each row, 0 from `end` on."""
    if EVEN:
        return tl.load(ptrs, eviction_policy=POLICY)
    else:
        return tl.load(ptrs, mask=(places < end)[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def _e2m1(packed, SHIFT: tl.constexpr):
    """Return the values of the 4-bit codes at bit SHIFT of bytes (int32), in fp32.

    Exponent and mantissa move to the lowest bits of fp32's exponent and the highest of its mantissa, which is the value
    times 2 ** -126, below the normal numbers for a code of 0.5. So kernels must not flush those to 0; Triton's do not.
    """
    bits = ((packed << (22 - SHIFT)) & 0x01C00000) | ((packed << (28 - SHIFT)) & -0x80000000)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _e4m3(byte):
    """Return the values of bytes (int32) in fp32; see _e2m1. Its exponent 0 is 2 ** -6, and it has no inf."""
    size = byte & 127
    bits = (size << 20) | ((byte << 24) & -0x80000000)
    return tl.where(size == 127, float("nan"), bits.to(tl.float32, bitcast=True) * 1.329227995784916e36)


@triton.jit
def _e8m0(scale):
    """Return 2 ** (scale - 127) in fp32. 2 ** -127 is below fp32's normal numbers; 255 gives inf, as in torch."""
    scale = scale.to(tl.int32)
    return tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)
