"""Products on the CPU by oneDNN, which torch includes: packed bf16 matrices, and 8-bit integers.

pack() stores a bf16 matrix in the order in which a product reads it. A product of the plain matrix reads it in pieces
of whole rows, which took 1.3 times as long. Products of few rows, with AMX of some hundred, on other cores than Intel's
of all rows, are those of kernels/native/products.c where it is loaded and the order is known.
Int8Matrix holds integers for VNNI, whose instructions multiply unsigned by signed bytes: activations are stored as
value + 128, and oneDNN subtracts 128 times the sum of each output's weights. Specifications: torch's linear, and
kernels/linear/w8a8.py, whose sums are these exactly.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.dispatch import has_bf16_products, has_int8_products
from kernels.linear.reference import MIN_SCALE
from kernels.linear.w8a8 import INT8_MAX
from kernels.native import ops as native
from kernels.native.library import products_level

_PACKED_FOR_ROWS = 32  # rows of x for which oneDNN chooses the order; others read the same order as fast
# Rows of x from which a product in fp32, of a matrix that is unpacked for it, is faster on an Intel core without AMX:
# it adds as many fp32 products per cycle as bf16 ones, at 1.6 times the rate
_WIDE_ROWS = 192
_WIDE_ELEMENTS = 1 << 26  # of a matrix that is unpacked at once, 256 MiB in fp32
_MAX_INPUTS = 65_536  # sums of (255 * 127) fit in 32 bits
_SHIFT = 128
# Rows of x up to which kernels/native/products.c is faster on every core that has its instructions
FEW_ROWS = 8
_FEW_INT8_ROWS = 32
_WIDTHS = (16, 32, 48, 64)  # outputs of a block of oneDNN's orders
_WORD_BYTES = 4  # inputs of one output that lie side by side in them
_SUM_BYTES = 4  # of each output's weights, which oneDNN may keep behind the bytes; other padding is of whole blocks


@dataclass(frozen=True)
class Bf16Matrix:
    """An [N, K] matrix of bf16 in the order of oneDNN's products."""

    # opaque, of the same shape and size (Tensor.is_mkldnn)
    packed: torch.Tensor
    address: int  # of its numbers
    width: int | None  # outputs of a block, if packed is [N / width, K / 2, width, 2]; None: another order

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.packed.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return 2 * self.shape.numel()


def can_pack(w: torch.Tensor) -> bool:
    """Return True if products of matrix w are faster if it is packed."""
    return w.device.type == "cpu" and w.dtype == torch.bfloat16 and w.numel() > 0 and has_bf16_products()


def pack(w: torch.Tensor) -> Bf16Matrix:
    """Return a packed copy of w, [N, K] bf16."""
    packed = torch.ops.mkldnn._reorder_linear_weight(w, _PACKED_FOR_ROWS)
    return Bf16Matrix(packed, torch.ops.mkldnn.data_ptr(packed), _block_width(packed, w))


def packed_linear(x: torch.Tensor, w: Bf16Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ w.T + bias. x: [T, K] bf16; w: [N, K] from pack(); bias: [N] or None; returns [T, N] bf16."""
    if w.width is not None and native.takes_products(x, bias, few_rows=_most_rows(FEW_ROWS), word_inputs=2):
        return native.bf16_linear(x, w.address, bias, w.packed.shape[0], w.width)
    if x.shape[0] >= _WIDE_ROWS and w.shape.numel() <= _WIDE_ELEMENTS and _is_wide_faster():
        wide_bias = None if bias is None else bias.float()
        return functional.linear(x.float(), w.packed.to_dense(torch.float32), wide_bias).to(x.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, w.packed, bias, "none", [], "")


@dataclass(frozen=True)
class Int8Matrix:
    """An [N, K] matrix of integers in the order of oneDNN's products, with a scale per output."""

    # opaque
    packed: torch.Tensor
    address: int  # of its integers
    # [N] fp32
    scales: torch.Tensor
    # [N] int32 zeros: weights are symmetric
    zeros: torch.Tensor
    # [N] int32, of each output's integers
    sums: torch.Tensor
    in_features: int  # K
    width: int | None  # outputs of a block, if packed begins as [N / width, K / 4, width, 4]; None: another order

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((self.scales.shape[0], self.in_features))

    @property
    def nbytes(self) -> int:
        """Bytes of the integers."""
        return self.shape.numel()


def can_pack_int8(w: torch.Tensor) -> bool:
    """Return True if this CPU's integer products take w, [N, K] int8."""
    return w.device.type == "cpu" and w.numel() > 0 and w.shape[1] <= _MAX_INPUTS and has_int8_products()


def pack_int8(w: torch.Tensor, scales: torch.Tensor) -> Int8Matrix:
    """Return w, [N, K] int8, packed. scales: [N] fp32."""
    packed = torch.ops.onednn.qlinear_prepack(w.contiguous(), [_PACKED_FOR_ROWS, w.shape[1]])
    sums = w.sum(1, dtype=torch.int32)
    zeros, address = torch.zeros_like(sums), torch.ops.mkldnn.data_ptr(packed)
    return Int8Matrix(packed, address, scales.float().contiguous(), zeros, sums, w.shape[1], _block_width(packed, w))


def int8_linear(
    x: torch.Tensor, w: Int8Matrix, bias: torch.Tensor | None, *, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ w.T + bias, x rounded to integers by row, or by input_scale ([] fp32). x: [T, K]; returns x's dtype [T, N].

    Equals w8a8.int8_linear of quantize_rows_int8 or quantize_by_int8.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, w.scales.shape[0])
    if w.width is not None and native.takes_products(x, bias, few_rows=_most_rows(_FEW_INT8_ROWS), word_inputs=4):
        if input_scale is None:
            return native.rounded_int8_linear(x, w.address, w.scales, w.sums, bias, w.width, least=MIN_SCALE)
        scales = input_scale.expand(x.shape[0], 1).contiguous()
        return native.int8_linear(_round_by(x, scales), scales, w.address, w.scales, w.sums, bias, w.width)
    is_native = native.takes_rows(x, *(() if bias is None else (bias,)))
    if input_scale is None and is_native:
        values, scales = native.quantize_rows(x, least=MIN_SCALE)
    elif input_scale is None:
        scales = torch.linalg.vector_norm(x, float("inf"), -1, True, dtype=torch.float32)
        scales.mul_(1.0 / INT8_MAX).clamp_(min=MIN_SCALE)
        values = (x / scales).round_().add_(_SHIFT).to(torch.uint8)
    else:
        scales = input_scale.expand(x.shape[0], 1).contiguous()
        values = _round_by(x, scales)
    sums = torch.ops.onednn.qlinear_pointwise(
        values, 1.0, _SHIFT, w.packed, w.scales, w.zeros, None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    if is_native:
        return native.scale_sums(sums, scales, bias)
    if bias is not None:
        return sums.mul_(scales).add_(bias).to(x.dtype)
    return torch.mul(sums, scales, out=torch.empty(sums.shape, dtype=x.dtype))


def _round_by(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return x divided by known scales, [T, 1] fp32, rounded, + 128; values beyond the range saturate."""
    return (x / scales).round_().clamp_(-INT8_MAX, INT8_MAX).add_(_SHIFT).to(torch.uint8)


def _block_width(packed: torch.Tensor, w: torch.Tensor) -> int | None:
    """Return how many outputs a block of `packed` has; None if it is not in blocks, or the numbers do not tell.

    oneDNN chooses the order by CPU and shape, and does not say which. packed: of w, [N, K]. The first and the last
    block are compared, with plain rows (a width of 1) too: numbers that are all equal there fit any order.
    """
    n, k = w.shape
    num_padding = torch.ops.mkldnn._nbytes(packed) - w.nbytes
    if k % (_WORD_BYTES // w.element_size()) or num_padding < 0:
        return None
    is_whole = num_padding in (0, _SUM_BYTES * n)  # else only a single block is certain
    stored = (ctypes.c_char * w.nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    found, numbers = torch.frombuffer(stored, dtype=torch.int8), w.contiguous().view(torch.int8)
    widths = [
        width for width in (1, *_WIDTHS)
        if n % width == 0 and (is_whole or n == width or width == 1) and all(
            torch.equal(
                found[start * numbers.shape[1] : (start + width) * numbers.shape[1]],
                numbers[start : start + width].view(width, -1, _WORD_BYTES).transpose(0, 1).reshape(-1),
            )
            for start in (0, n - width)
        )
    ]  # fmt: skip
    return widths[0] if len(widths) == 1 and widths[0] in _WIDTHS else None


def _most_rows(few_rows: int) -> int:
    """Return the rows up to which products.c is faster: all of them, but few on Intel's cores, and with AMX."""
    return few_rows if products_level() == native.BY_AMX or _is_wide_faster() else native.ANY_ROWS


@functools.cache
def _is_wide_faster() -> bool:
    facts = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return str(facts.get("cpu_name", "")).startswith("Intel") and not torch.cpu._is_amx_tile_supported()
