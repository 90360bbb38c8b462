"""load_tile: a tile of an ExpertMatrix as values, whatever its storage. Triton twin of kernels/moe/storage.py.

Hopper has no FP4 units: codes become floats in registers, by arithmetic, and the product is that of 16-bit values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.e2m1 import MXFP4_BLOCK, NVFP4_BLOCK
from kernels.linear.reference import BLOCK as LUT4_BLOCK
from kernels.moe.storage import ExpertMatrix, Fp8Matrix, Mxfp4Matrix
from kernels.moe.storage_int import IntMatrix
from kernels.moe.storage_lut4 import TABLES, Lut4Matrix
from kernels.moe.storage_nvfp4 import Nvfp4Matrix
from kernels.moe.triton_storage_int import is_integers, load_int_tile, name_of

# ruff: noqa: ANN001, ANN201, ANN202  (Triton reads annotations as types: kernel arguments carry none)

_NF4 = tl.constexpr(TABLES["nf4"])
_FP4 = tl.constexpr(TABLES["fp4"])


@dataclass(frozen=True)
class StoredTensors:
    """The arguments that kernels take of an ExpertMatrix."""

    values: torch.Tensor
    scales: torch.Tensor | None
    # "dense", "mxfp4", "nvfp4", "nf4", "fp4", "fp8", "fp8_bytes": for GPUs on which Triton has no e4m3, or a name of
    # triton_storage_int
    storage: str
    rows: int = 1  # outputs and inputs that share a scale
    columns: int = 1  # 0: all, of integers
    factors: torch.Tensor | None = None  # of nvfp4: one for each half, on its scales

    @classmethod
    def of(cls, matrix: ExpertMatrix) -> StoredTensors:
        """Take a matrix apart, whose tensors must be contiguous."""
        if isinstance(matrix, Mxfp4Matrix):
            stored = cls(matrix.blocks, matrix.scales, "mxfp4", 1, MXFP4_BLOCK)
        elif isinstance(matrix, Fp8Matrix):
            has_fp8 = has_fp8_loads(matrix.values.device)
            values = matrix.values if has_fp8 else matrix.values.view(torch.uint8)
            # of a single group of inputs any larger power of two is the size: tiles divide it
            columns = max(matrix.columns, triton.next_power_of_2(matrix.shape[2]))
            columns = columns if matrix.scales.shape[-1] == 1 else matrix.columns
            stored = cls(values, matrix.scales, "fp8" if has_fp8 else "fp8_bytes", matrix.rows, columns)
        elif isinstance(matrix, Nvfp4Matrix):
            scales = matrix.scales.view(torch.uint8)
            stored = cls(matrix.blocks, scales, "nvfp4", 1, NVFP4_BLOCK, matrix.factors)
        elif isinstance(matrix, Lut4Matrix):
            stored = cls(matrix.packed, matrix.scales, matrix.kind, 1, LUT4_BLOCK)
        elif isinstance(matrix, IntMatrix):
            group_size = matrix.group_size if matrix.num_groups > 1 else 0
            stored = cls(matrix.words, matrix.groups, name_of(matrix), 1, group_size)
        else:
            assert isinstance(matrix, torch.Tensor)
            stored = cls(matrix, None, "dense")
        assert all(each is None or each.is_contiguous() for each in (stored.values, stored.scales, stored.factors))
        return stored


@functools.cache
def has_fp8_loads(device: torch.device) -> bool:
    """Return True if Triton has the type e4m3 on the device: from compute capability 8.9 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def load_tile(
    w_ptr, scales_ptr, factors_ptr, half, n, k, features, start, dtype: tl.constexpr,
    STORAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    STREAMS: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK_N, BLOCK_K] of dtype: inputs start … of `features`, any finite number past the end.

    half: index of the matrix [n, k] among all experts' halves, int64; features < n. BLOCK_K divides start, and divides
    COLUMNS or is a multiple of it, except for integers. STREAMS: each weight is read once and need not stay in L2.
    """
    policy: tl.constexpr = "evict_first" if STREAMS else ""
    rows = half * n + features
    if STORAGE == "mxfp4" or STORAGE == "nvfp4" or STORAGE == "nf4" or STORAGE == "fp4":
        places = start // 2 + tl.arange(0, BLOCK_K // 2)
        ptrs = w_ptr + rows[:, None] * (k // 2) + places[None, :]
        packed = _load(ptrs, places, k // 2, EVEN_K, policy).to(tl.int32)
        if STORAGE == "nf4" or STORAGE == "fp4":
            values = tl.interleave(look_up(packed >> 4, STORAGE), look_up(packed & 15, STORAGE))
        else:
            values = tl.interleave(_e2m1(packed, 0), _e2m1(packed, 4))
    elif is_integers(STORAGE):
        values = load_int_tile(w_ptr, scales_ptr, rows, k, start, STORAGE, COLUMNS, BLOCK_K, EVEN_K, policy)
    else:
        places = start + tl.arange(0, BLOCK_K)
        values = _load(w_ptr + rows[:, None] * k + places[None, :], places, k, EVEN_K, policy)
        if STORAGE == "fp8_bytes":
            values = _e4m3(values.to(tl.int32))
    if STORAGE != "dense" and not is_integers(STORAGE):
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
        if STORAGE == "nvfp4":
            scales = _e4m3(scales.to(tl.int32)) * tl.load(factors_ptr + half)
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


@triton.jit
def look_up(codes, KIND: tl.constexpr):
    """Return the values of bitsandbytes' codes (int32, 0 to 15), in fp32, by a tree of selections over constants.

    Not by loads: Triton's pipeliner would copy what each index of a tile finds through shared memory.
    """
    if KIND == "nf4":
        return tl.where((codes & 8) != 0, _select_8(codes, _NF4, 8), _select_8(codes, _NF4, 0))
    else:
        sizes = _select_8(codes, _FP4, 0)
        return tl.where((codes & 8) != 0, -sizes, sizes)


@triton.jit
def _select_8(codes, TABLE: tl.constexpr, FIRST: tl.constexpr):
    """Return the entries of TABLE from FIRST on, by the three lowest bits."""
    is_odd = (codes & 1) != 0
    low = tl.where(
        (codes & 2) != 0,
        tl.where(is_odd, TABLE[FIRST + 3], TABLE[FIRST + 2]),
        tl.where(is_odd, TABLE[FIRST + 1], TABLE[FIRST]),
    )
    high = tl.where(
        (codes & 2) != 0,
        tl.where(is_odd, TABLE[FIRST + 7], TABLE[FIRST + 6]),
        tl.where(is_odd, TABLE[FIRST + 5], TABLE[FIRST + 4]),
    )
    return tl.where((codes & 4) != 0, high, low)
