"""Products whose activations are rounded to 8 bits: each selects its Triton twin on CUDA, or torch.

kernels/linear/reference.py, rounding.py and w8a8.py are the specifications. Imports Triton if it can.

rows_linear multiplies 8-bit floats: tensor cores support e4m3 since Ada, and torch's product with a scale per row is
used since Hopper; on older GPUs the values, which are exact in bf16, are multiplied as bf16. Fp8BlockLinear multiplies
8-bit floats with scales by block, and Int8Linear integers, on a CPU by onednn.py. Few rows have kernels of their own on
Hopper (few_rows_configs.py).
"""

from __future__ import annotations

import functools

import torch

from kernels.dispatch import HAS_TRITON, has_pdl, is_hopper, on_triton, op, when_used
from kernels.linear import onednn, reference, rounding, w8a8
from kernels.linear.few_rows_configs import MAX_ROWS, MAX_ROWS_BY_BLOCK, few_rows_config, row8_config
from kernels.linear.onednn import Int8Matrix
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.scaled8_configs import MAX_SMALL_TILES, scaled8_config
from kernels.linear.splits import LazyScratch

if HAS_TRITON:
    triton_fp8 = when_used("kernels.linear.triton_fp8")
    triton_row8 = when_used("kernels.linear.triton_row8")
    triton_scaled8 = when_used("kernels.linear.triton_scaled8")
    gluon_blocks = when_used("kernels.linear.gluon_blocks")
try:
    from kernels.linear import gluon_few_rows

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

# Rows of x up to which streaming the weights is faster than torch's product on an H100, where no other kernel of few
# rows runs
_FEW_ROWS = 16
# Rows of x up to which torch's product adds the sums of 128 e4m3 products in fp32, as those of fewer rows do: a text
# depends on the number of rows that decode beside it no more than in bf16. So few rows are bound by memory
_EXACT_ROWS = 256


def has_twin(x: torch.Tensor) -> bool:
    """Return True if Triton rounds x to e4m3."""
    return on_triton(x) and _capability(x.device) >= (8, 9)


def rounds_before(weight: torch.Tensor) -> bool:
    """Return True if the op before a product of this matrix of 8 bits is to round its input: where Triton does both."""
    return has_twin(weight)


quantize_rows = op(reference.quantize_rows, "kernels.linear.triton_fp8", can_run=has_twin)
quantize_by = op(reference.quantize_by, "kernels.linear.triton_fp8", can_run=has_twin)
quantize_groups = op(reference.quantize_groups, "kernels.linear.triton_fp8", can_run=has_twin)
add_rms_norm_rounded = op(rounding.add_rms_norm_rounded, "kernels.linear.triton_rounded", can_run=has_twin)
gate_and_mul_rounded = op(rounding.gate_and_mul_rounded, "kernels.linear.triton_rounded", can_run=has_twin)
quantize_rows_int8 = op(w8a8.quantize_rows_int8, "kernels.linear.triton_scaled8")
quantize_by_int8 = op(w8a8.quantize_by_int8, "kernels.linear.triton_scaled8")


def _multiply_few(
    x: RoundedRows,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    rows_per_scale: int = 0,
    scratch: LazyScratch | None = None,
) -> torch.Tensor | None:
    """Multiply by a kernel of few rows, if one supports these and measured faster: [T, N], or None.

    x, w: of one dtype of 8 bits. rows_per_scale: of w, in blocks of 128 columns; 0: a scale for each row.
    """
    num_rows, (n, k) = x.values.shape[0], w.shape
    by_block = rows_per_scale > 0
    most = MAX_ROWS_BY_BLOCK if by_block else MAX_ROWS
    if not (on_triton(w) and is_hopper(w.device) and 0 < num_rows <= most):
        return None
    if num_rows == 1 and k % 16 == 0:
        row_config = row8_config(n=n, k=k, dtype=w.dtype, by_block=by_block)
        if rows_per_scale % row_config.block_n == 0:
            return triton_row8.row8_linear(
                x.values, x.scales, w, w_scales, bias,
                dtype=x.dtype, config=row_config, rows_per_scale=rows_per_scale, pdl=True,
            )  # fmt: skip
    if not (HAS_GLUON and gluon_few_rows.takes(x.values, w)):
        return None
    num_sms = torch.cuda.get_device_properties(w.device).multi_processor_count
    parts = None if scratch is None else scratch.on(w.device)
    return gluon_few_rows.few_rows_linear(
        x.values, x.scales, w, w_scales, bias,
        few_rows_config(num_rows=num_rows, n=n, k=k, by_block=by_block, num_sms=num_sms),
        dtype=x.dtype, rows_per_scale=rows_per_scale, scratch=parts, pdl=True,
    )  # fmt: skip


class Fp8BlockLinear:
    """Rounds x by token and group of columns, and multiplies e4m3 with scales by block. Owns scratch for one stream.

    Equals kernels.linear.reference: blocks_linear of quantize_groups.
    """

    def __init__(self) -> None:
        self._scratch = LazyScratch()

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        rows: int,
        columns: int,
    ) -> torch.Tensor:
        """x: [T, K]; w, scales: as quantize_blocks(…, rows, columns) returns; returns [T, N], of x's dtype."""
        return self.multiply(round_rows(x, Rounding(columns)), w, scales, bias, rows=rows, columns=columns)

    def multiply(
        self,
        x: RoundedRows,
        w: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        rows: int,
        columns: int,
    ) -> torch.Tensor:
        """Multiply rows that are rounded in runs of `columns`; see __call__."""
        if not has_twin(x.values):
            return reference.blocks_linear(x.values, x.scales, w, scales, bias, x.dtype, rows=rows, columns=columns)
        if columns == 128:
            few = _multiply_few(x, w, scales, bias, rows_per_scale=rows, scratch=self._scratch)
            if few is not None:
                return few
        num_rows = x.values.shape[0]
        if num_rows > MAX_SMALL_TILES and _takes_blocks(x.values, w, rows=rows, columns=columns):
            return gluon_blocks.blocks_linear(x.values, x.scales, w, scales, bias, dtype=x.dtype, pdl=True)
        config = scaled8_config(
            num_rows=num_rows, n=w.shape[0], k=w.shape[1], block_k=columns, by_block=True,
            has_tma=_capability(w.device) >= (9, 0) and columns == 128 and triton_scaled8.can_load_by_tma(x.values),
        )  # fmt: skip
        return triton_scaled8.blocks_linear(
            x.values, x.scales, w, scales, bias, self._scratch.on(w.device),
            rows=rows, columns=columns, dtype=x.dtype, config=config, pdl=has_pdl(w.device),
        )  # fmt: skip


class Int8Linear:
    """Rounds x to integers, by token or by a known scale, and multiplies integers. Owns scratch for one stream.

    Equals kernels.linear.w8a8: int8_linear of quantize_rows_int8 or quantize_by_int8.
    """

    _BLOCK_K = 128

    def __init__(self) -> None:
        self._scratch = LazyScratch()

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor | Int8Matrix,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        input_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """x: [T, K]; w: [N, K] int8; scales: [N]; input_scale: [] fp32, or None; returns [T, N], of x's dtype.

        An Int8Matrix has its own scales.
        """
        if isinstance(w, Int8Matrix):
            return onednn.int8_linear(x, w, bias, input_scale=input_scale)
        return self.multiply(round_rows(x, Rounding(scale=input_scale, dtype=torch.int8)), w, scales, bias)

    def multiply(
        self, x: RoundedRows, w: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply rows that are rounded to integers; see __call__."""
        if not on_triton(x.values):
            return w8a8.int8_linear(x.values, x.scales, w, scales, bias, x.dtype)
        few = _multiply_few(x, w, scales, bias)
        if few is not None:
            return few
        config = scaled8_config(
            num_rows=x.values.shape[0], n=w.shape[0], k=w.shape[1], block_k=self._BLOCK_K,
            has_tma=_capability(w.device) >= (9, 0) and triton_scaled8.can_load_by_tma(x.values),
        )  # fmt: skip
        return triton_scaled8.int8_linear(
            x.values, x.scales, w, scales, bias, self._scratch.on(w.device),
            dtype=x.dtype, config=config, pdl=has_pdl(w.device),
        )  # fmt: skip


def round_rows(x: torch.Tensor, how: Rounding) -> RoundedRows:
    """See kernels.linear.rounding.round_rows."""
    if how.dtype == torch.int8:
        values, scales = quantize_rows_int8(x) if how.scale is None else quantize_by_int8(x, how.scale)
    elif how.columns is not None:
        values, scales = quantize_groups(x, how.columns)
    elif how.scale is not None:
        values, scales = quantize_by(x, how.scale)
    else:
        values, scales = quantize_rows(x)
    return RoundedRows(values, scales, x.dtype)


def rows_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See kernels.linear.reference.rows_linear."""
    few = _multiply_few(RoundedRows(x, x_scales, dtype), w, w_scales, bias)
    if few is not None:
        return few
    if has_twin(x) and x.shape[0] <= (_FEW_ROWS if _has_rowwise_product(w) else triton_fp8.MAX_ROWS):
        return triton_fp8.rows_linear(x, x_scales, w, w_scales, bias, dtype, pdl=has_pdl(x.device))
    if _has_rowwise_product(w):
        return _scaled_mm(x, x_scales, w, w_scales, bias, dtype)
    if x.is_cuda:
        out = (x.bfloat16() @ w.bfloat16().T).float() * x_scales[:, None] * w_scales
        return (out if bias is None else out + bias.float()).to(dtype)
    return reference.rows_linear(x, x_scales, w, w_scales, bias, dtype)


def _scaled_mm(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute torch's product with scales per row, which returns bf16 only and adds only a bf16 bias.

    For many rows Hopper's tensor cores add with about 14 bits (DeepSeek-V3, arXiv:2412.19437, §3.3.2).
    """
    out = torch._scaled_mm(
        x,
        w.t(),
        scale_a=x_scales[:, None].contiguous(),
        scale_b=w_scales[None, :],
        bias=bias if bias is not None and bias.dtype == torch.bfloat16 else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=x.shape[0] > _EXACT_ROWS,
    )
    if bias is not None and bias.dtype != torch.bfloat16:
        return out.to(dtype) + bias
    return out.to(dtype)


def _has_rowwise_product(w: torch.Tensor) -> bool:
    return w.is_cuda and _capability(w.device) >= (9, 0) and w.shape[0] % 16 == 0 and w.shape[1] % 16 == 0


def _takes_blocks(x: torch.Tensor, w: torch.Tensor, *, rows: int, columns: int) -> bool:
    """Return True if the kernel for Hopper multiplies these values of 8 bits, whose scales have such blocks.

    Outputs that are no multiple of 16 it stores two bytes at a time: 44 us where Triton takes 26 (1,000 x 2,176).
    """
    if not (HAS_GLUON and is_hopper(w.device)) or w.shape[0] % 16:
        return False
    return gluon_blocks.takes(x, w, rows=rows, columns=columns)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
