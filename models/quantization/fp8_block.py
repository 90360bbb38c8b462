"""FP8 (e4m3) weights with a scale per block (DeepSeek-V3, arXiv:2412.19437, §3.3), activations by groups of a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.linear import ops as fp8_ops
from kernels.linear.reference import FP8, quantize_blocks
from models.quantization.linear_method import LinearPart
from models.quantization.shards import SCALE_DTYPES, StoredPart, merge_outputs, read_dense
from models.weights.weights import Weights


@dataclass(frozen=True)
class Fp8Block:
    """Scheme: blocks of rows × columns weights, and groups of as many columns of each token."""

    COLUMNS: ClassVar[tuple[int, ...]] = (32, 64, 128)

    rows: int
    columns: int

    @property
    def output_multiple(self) -> int:
        """Ranks may cut through blocks of rows."""
        return 1

    @property
    def input_multiple(self) -> int:
        """A group of columns is on one rank."""
        return self.columns

    def describe(self) -> str:
        """See Scheme.describe."""
        return f"fp8 (e4m3; scales: weights by {self.rows} × {self.columns}, activations by token and {self.columns})"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return out_features * in_features + 4 * -(-out_features // self.rows) * -(-in_features // self.columns)

    def make_method(self) -> Fp8BlockLinear:
        """See Scheme.make_method."""
        return Fp8BlockLinear(self)


@dataclass(frozen=True)
class Fp8BlockParams:
    """Parts merged along their outputs."""

    # [out, in] e4m3
    weight: torch.Tensor
    # [ceil(out / rows), ceil(in / columns)] fp32
    scales: torch.Tensor
    # the scheme's, or fewer where a part begins or ends within a block
    rows: int


class Fp8BlockLinear:
    """LinearMethod of Fp8Block."""

    def __init__(self, scheme: Fp8Block) -> None:
        self._scheme = scheme

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> Fp8BlockParams:
        """Read `weight` and `weight_scale_inv` of each part; see LinearMethod.load."""
        scheme = self._scheme
        stored = [StoredPart.locate(w, part) for part in parts]
        # All of these end on multiples of it, so that one number of rows per scale does for the merged matrix
        rows = math.gcd(scheme.rows, *(edge for part in stored for edge in (part.rows.start, len(part.rows))))
        rows = scheme.rows if len(stored) == 1 and stored[0].rows.start % scheme.rows == 0 else rows
        if w.is_random:
            values = [quantize_blocks(read_dense(w, part), rows, scheme.columns) for part in parts]
        else:
            values = [(part.matrix("weight", (FP8,)), self._read_scales(part, rows)) for part in stored]
        weight, scales = (merge_outputs([pair[i] for pair in values]) for i in range(2))
        return Fp8BlockParams(weight, scales, rows)

    def apply(self, params: Fp8BlockParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        columns = self._scheme.columns
        quantized, x_scales = fp8_ops.quantize_groups(x, columns)
        return fp8_ops.blocks_linear(
            quantized, x_scales, params.weight, params.scales, bias, x.dtype, rows=params.rows, columns=columns
        )

    def _read_scales(self, part: StoredPart, rows: int) -> torch.Tensor:
        """One row of scales for each `rows` rows of this rank's share, which divide the scheme's, or are the same."""
        scheme = self._scheme
        shape = (-(-part.num_rows // scheme.rows), -(-part.num_columns // scheme.columns))
        first, last = part.columns.start // scheme.columns, -(-part.columns.stop // scheme.columns)
        scales = part.w.stored(part.need("weight_scale_inv", "weight_scale"), shape, SCALE_DTYPES)[:, first:last]
        firsts = torch.arange(part.rows.start, part.rows.stop, rows, device=scales.device)
        return scales.float()[firsts // scheme.rows].contiguous()
