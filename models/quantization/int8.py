"""W8A8: 8-bit integers of weights and of activations (compressed-tensors, format int-quantized).

A matrix has `weight` int8 [out, in] and `weight_scale`, one per output or one. Activations are rounded to integers by
token, or by a static scale, `input_scale`. See kernels/linear/w8a8.py for the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.linear import eight_bits
from kernels.linear.onednn import Int8Matrix, can_pack_int8, pack_int8
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.linear.w8a8 import INT8_MAX, quantize_matrix_int8
from models.quantization.linear_method import LinearPart
from models.quantization.shards import (
    StoredPart,
    check_each,
    expected_dense,
    expected_number,
    expected_per_row,
    merge_outputs,
    read_dense,
)
from models.weights.headers import ExpectedTensor
from models.weights.weights import Weights

_RANDOM_INPUT_SCALE = 4.0 / INT8_MAX  # of random weights: their inputs have about unit variance


@dataclass(frozen=True)
class Int8:
    """Scheme: weights and activations of 8-bit integers."""

    weights: Literal["tensor", "row"]
    activations: Literal["token", "static"]
    is_stored: bool = True  # False: quantised on load
    output_multiple: int = 1
    input_multiple: int = 1

    def describe(self) -> str:
        """See Scheme.describe."""
        activations = "by token" if self.activations == "token" else "static"
        return f"int8 (scales: weights by {self.weights}, activations {activations})"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return out_features * in_features + 4 * out_features

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        if not self.is_stored:
            return expected_dense(part)
        by = expected_per_row(part, "weight_scale") if self.weights == "row" else expected_number("weight_scale")
        weight = ExpectedTensor.of("weight", (part.num_rows, part.num_columns), dtypes=(torch.int8,))
        return [by, weight] if self.activations == "token" else [by, expected_number("input_scale"), weight]

    def make_method(self) -> Int8Method:
        """See Scheme.make_method."""
        return Int8Method(self)


ON_LOAD = Int8("row", "token", is_stored=False)


@dataclass(frozen=True)
class Int8Params:
    """Parts merged along their outputs."""

    # [out, in] int8, or packed for a CPU's integer products
    weight: torch.Tensor | Int8Matrix
    # [out] fp32, also for one scale per tensor, since merged tensors have several
    scales: torch.Tensor
    # [] fp32 static scale; None: computed for each token
    input_scale: torch.Tensor | None


class Int8Method:
    """LinearMethod of Int8."""

    def __init__(self, scheme: Int8) -> None:
        self._scheme = scheme
        self._linear = eight_bits.Int8Linear()

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> Int8Params:
        """See LinearMethod.load."""
        is_static = self._scheme.activations == "static"
        if w.is_random or not self._scheme.is_stored:
            values = [quantize_matrix_int8(read_dense(w, part)) for part in parts]
            scale = torch.full((), _RANDOM_INPUT_SCALE, device=w.device) if is_static else None
            weight, scales = (merge_outputs([pair[i] for pair in values]) for i in range(2))
            return make_int8_params(weight, scales, scale)
        stored = [StoredPart.locate(w, part) for part in parts]
        # the small tensors first: without them no matrix is read
        read = [self._read_scales(part) for part in stored]
        check_each(read, stored, "weight_scale", is_signed=True)
        scales = merge_outputs(read)
        # parts share one input, and a larger scale covers a smaller one's range
        inputs = [part.scalar(part.need("input_scale")) for part in stored] if is_static else []
        weight = merge_outputs([part.matrix("weight", (torch.int8,)) for part in stored])
        return make_int8_params(weight, scales, torch.stack(inputs).amax() if inputs else None)

    def apply(self, params: Int8Params, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        return self._linear(x, params.weight, params.scales, bias, input_scale=params.input_scale)

    def rounding(self, params: Int8Params) -> Rounding | None:
        """See TakesRoundedRows.rounding: by token, or by the static scale."""
        if isinstance(params.weight, Int8Matrix) or not eight_bits.rounds_before(params.weight):
            return None
        return Rounding(scale=params.input_scale, dtype=torch.int8)

    def apply_rounded(self, params: Int8Params, x: RoundedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """See TakesRoundedRows.apply_rounded."""
        assert isinstance(params.weight, torch.Tensor)
        return self._linear.multiply(x, params.weight, params.scales, bias)

    def _read_scales(self, part: StoredPart) -> torch.Tensor:
        """Read the scales: [outputs of this rank] fp32."""
        name = part.need("weight_scale")
        if self._scheme.weights == "row":
            return part.per_row(name)
        return part.scalar(name).expand(len(part.rows))


def make_int8_params(weight: torch.Tensor, scales: torch.Tensor, input_scale: torch.Tensor | None = None) -> Int8Params:
    """Make params of integers [out, in] int8, packed if this CPU multiplies them so. Others: see Int8Params."""
    return Int8Params(pack_int8(weight, scales) if can_pack_int8(weight) else weight, scales, input_scale)
