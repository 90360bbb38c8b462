"""FP8 (e4m3) schemes of quant_method fp8, and of quantisation on load.

Fp8 scales weights by tensor or by row, and activations by token or by a static scale. Fp8Block scales weights by block
and activations by groups of a token's columns (DeepSeek-V3, arXiv:2412.19437, §3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kernels.linear import eight_bits
from kernels.linear.reference import FP8, quantize_blocks, quantize_rows
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.moe.planes import fp8_planes_bytes
from kernels.moe.storage import Fp8Matrix
from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import LayerNames, QuantizationConfig, Scheme
from models.quantization.linear_method import LinearPart, ReadExpert
from models.quantization.shards import (
    SCALE_DTYPES,
    StoredPart,
    check_each,
    check_scales,
    expected_dense,
    expected_number,
    expected_per_row,
    merge_outputs,
    part_of_expert,
    read_dense,
)
from models.weights.headers import ExpectedTensor, TensorForm
from models.weights.weights import Weights

# The names of scales
_SCALES = ("weight_scale", "weight_scale_inv")
_BLOCK_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")


@dataclass(frozen=True)
class Fp8BlockParams:
    """Parts merged along their outputs."""

    # [out, in] e4m3
    weight: torch.Tensor
    # [ceil(out / rows), ceil(in / columns)] fp32
    scales: torch.Tensor
    # rows of a block: the scheme's, or fewer where a part begins or ends within a block
    rows: int


@dataclass(frozen=True)
class Fp8Block:
    """Scheme: weights scaled by blocks of rows × columns.

    Activations are scaled by groups of as many columns of each token.
    """

    COLUMNS: ClassVar[tuple[int, ...]] = (32, 64, 128)

    rows: int
    columns: int

    @property
    def output_multiple(self) -> int:
        """Return 1: ranks may split a block of rows."""
        return 1

    @property
    def input_multiple(self) -> int:
        """Return the columns of a block: one rank holds each group of columns."""
        return self.columns

    def describe(self) -> str:
        """See Scheme.describe."""
        return f"fp8 (e4m3; scales: weights by {self.rows} × {self.columns}, activations by token and {self.columns})"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return out_features * in_features + 4 * -(-out_features // self.rows) * -(-in_features // self.columns)

    def planes_bytes(self, out_features: int, in_features: int) -> int | None:
        """See ArrangedExperts.planes_bytes."""
        return fp8_planes_bytes(out_features, in_features, rows=self.rows, columns=self.columns)

    def make_method(self) -> Fp8BlockMethod:
        """See Scheme.make_method."""
        return Fp8BlockMethod(self)

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        shape = (-(-part.num_rows // self.rows), -(-part.num_columns // self.columns))
        return [
            ExpectedTensor(tuple(TensorForm(name, (shape,), SCALE_DTYPES) for name in _BLOCK_SCALES)),
            ExpectedTensor.of("weight", (part.num_rows, part.num_columns), dtypes=(FP8,)),
        ]

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> Fp8BlockParams:
        """Read `weight` and `weight_scale_inv` of each part; see LinearMethod.load."""
        stored = [StoredPart.locate(w, part) for part in parts]
        # Parts end on multiples of this number, so it can be the rows per scale of the merged matrix
        rows = math.gcd(self.rows, *(edge for part in stored for edge in (part.rows.start, len(part.rows))))
        rows = self.rows if len(stored) == 1 and stored[0].rows.start % self.rows == 0 else rows
        if w.is_random:
            values = [quantize_blocks(read_dense(w, part), rows, self.columns) for part in parts]
        else:
            read = [self._read_scales(part, rows) for part in stored]
            check_each(read, stored, *_BLOCK_SCALES)
            values = [(part.matrix("weight", (FP8,)), each) for part, each in zip(stored, read, strict=True)]
        weight, scales = (merge_outputs([pair[i] for pair in values]) for i in range(2))
        return Fp8BlockParams(weight, scales, rows)

    def load_each(self, w: Weights, experts: range, parts: Sequence[LinearPart]) -> Fp8Matrix:
        """Read `weight` and `weight_scale_inv` of each part of each expert; see EachExpert.load_each."""
        first = [StoredPart.locate(w / f"experts.{experts[0]}", part) for part in parts]
        rows = self.rows
        if any(part.rows.start % rows != 0 for part in first):
            rows = math.gcd(rows, *(part.rows.start for part in first))
        n, k = parts[0].outputs, parts[0].inputs
        values = torch.empty(len(experts), len(parts), n, k, dtype=FP8, device=w.device)
        shape = (len(experts), len(parts), -(-n // rows), -(-k // self.columns))
        scales = torch.ones(shape, dtype=torch.float32, device=w.device)
        for index, expert in enumerate(experts):
            for place, part in enumerate(parts):
                stored = StoredPart.locate(w / f"experts.{expert}", part)
                if not w.is_random:  # random weights are as wide as others without scales
                    scales[index, place] = self._read_scales(stored, rows)
                values[index, place] = stored.matrix("weight", (FP8,))
        if not w.is_random:
            check_scales(scales.flatten(0, 1), part_of_expert(w, experts, parts), *_BLOCK_SCALES)
        return Fp8Matrix(values.flatten(1, 2), scales, rows, self.columns)

    def _read_scales(self, part: StoredPart, rows: int) -> torch.Tensor:
        """Read one row of scales for each `rows` rows of this rank's share. rows divides the scheme's block rows."""
        shape = (-(-part.num_rows // self.rows), -(-part.num_columns // self.columns))
        first, last = part.columns.start // self.columns, -(-part.columns.stop // self.columns)
        scales = part.w.stored(part.need(*_BLOCK_SCALES), shape, SCALE_DTYPES)[:, first:last]
        firsts = torch.arange(part.rows.start, part.rows.stop, rows, device=scales.device)
        return scales.float()[firsts // self.rows].contiguous()


class Fp8BlockMethod:
    """LinearMethod of Fp8Block."""

    def __init__(self, scheme: Fp8Block) -> None:
        self._scheme = scheme
        self._linear = eight_bits.Fp8BlockLinear()

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> Fp8BlockParams:
        """See LinearMethod.load."""
        return self._scheme.load(w, parts)

    def apply(self, params: Fp8BlockParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        sizes = {"rows": params.rows, "columns": self._scheme.columns}
        return self._linear(x, params.weight, params.scales, bias, **sizes)

    def rounding(self, params: Fp8BlockParams) -> Rounding | None:
        """See TakesRoundedRows.rounding: by the columns of a block."""
        return Rounding(self._scheme.columns) if eight_bits.rounds_before(params.weight) else None

    def apply_rounded(self, params: Fp8BlockParams, x: RoundedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """See TakesRoundedRows.apply_rounded."""
        sizes = {"rows": params.rows, "columns": self._scheme.columns}
        return self._linear.multiply(x, params.weight, params.scales, bias, **sizes)


@dataclass(frozen=True)
class Fp8Params:
    """Parts merged along their outputs."""

    # [out, in] e4m3
    weight: torch.Tensor
    # [out] fp32, also for one scale per tensor, since merged tensors have several
    scales: torch.Tensor
    # [] fp32 static scale; None: computed for each token
    input_scale: torch.Tensor | None


@dataclass(frozen=True)
class Fp8:
    """Scheme and its LinearMethod: weights scaled by tensor or by row; activations by token, or by a static scale.

    Scaling by token also replaces one scale per step: no coarser, and a token's result does not depend on its batch.
    """

    weights: Literal["tensor", "row"]
    activations: Literal["token", "static"]
    is_stored: bool  # False: weights are quantised while they are read
    output_multiple: int = 1
    input_multiple: int = 1

    def describe(self) -> str:
        """See Scheme.describe."""
        activations = "by token" if self.activations == "token" else "static"
        return f"fp8 (e4m3; scales: weights by {self.weights}, activations {activations})"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return out_features * in_features + 4 * out_features

    def planes_bytes(self, out_features: int, in_features: int) -> int | None:
        """See ArrangedExperts.planes_bytes: a scale for each output."""
        return fp8_planes_bytes(out_features, in_features, rows=1, columns=in_features)

    def make_method(self) -> Fp8:
        """See Scheme.make_method."""
        return self

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        if not self.is_stored:
            return expected_dense(part)
        by = expected_per_row(part, *_SCALES) if self.weights == "row" else expected_number(*_SCALES)
        weight = ExpectedTensor.of("weight", (part.num_rows, part.num_columns), dtypes=(FP8,))
        return [by, weight] if self.activations == "token" else [by, expected_number(*_INPUT_SCALES), weight]

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> Fp8Params:
        """Read `weight`, `weight_scale` and `input_scale` of each part; see LinearMethod.load."""
        if not self.is_stored or w.is_random:
            values = [quantize_rows(read_dense(w, part)) for part in parts]
            scale = torch.ones((), device=w.device) / 16 if self.activations == "static" else None
            return Fp8Params(
                merge_outputs([value for value, _ in values]), merge_outputs([scales for _, scales in values]), scale
            )
        stored = [StoredPart.locate(w, part) for part in parts]
        read = [self._read_scales(part) for part in stored]
        check_each(read, stored, *_SCALES)
        scales = merge_outputs(read)
        weight = merge_outputs([part.matrix("weight", (FP8,)) for part in stored])
        return Fp8Params(weight, scales, self._read_input_scale(stored))

    def apply(self, params: Fp8Params, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        return self.apply_rounded(params, eight_bits.round_rows(x, Rounding(scale=params.input_scale)), bias)

    def rounding(self, params: Fp8Params) -> Rounding | None:
        """See TakesRoundedRows.rounding: by token, or by the static scale."""
        return Rounding(scale=params.input_scale) if eight_bits.rounds_before(params.weight) else None

    def apply_rounded(self, params: Fp8Params, x: RoundedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """See TakesRoundedRows.apply_rounded."""
        return eight_bits.rows_linear(x.values, x.scales, params.weight, params.scales, bias, x.dtype)

    def load_each(self, w: Weights, experts: range, parts: Sequence[LinearPart]) -> Fp8Matrix:
        """Read `weight` and `weight_scale` of each part of each expert, all scales first; see EachExpert.load_each.

        Activations of experts are not rounded, so a static scale of theirs has no use.
        """
        stored = [[StoredPart.locate(w / f"experts.{expert}", part) for part in parts] for expert in experts]
        n, k = parts[0].outputs, parts[0].inputs
        scales = torch.ones(len(experts), len(parts), n, 1, dtype=torch.float32, device=w.device)
        values = torch.empty(len(experts), len(parts), n, k, dtype=FP8, device=w.device)
        for index, row in enumerate(stored):
            if w.is_random:  # random weights are as wide as others without scales
                break
            for place, part in enumerate(row):
                scales[index, place, :, 0] = self._read_scales(part)
                self._read_input_scale([part])
        if not w.is_random:
            check_scales(scales.flatten(0, 1), part_of_expert(w, experts, parts), *_SCALES)
        for index, row in enumerate(stored):
            for place, part in enumerate(row):
                values[index, place] = part.matrix("weight", (FP8,))
        return Fp8Matrix(values.flatten(1, 2), scales, 1, k)

    def quantize_each(self, experts: range, read: ReadExpert) -> Fp8Matrix:
        """See QuantizesExperts.quantize_each: a scale for each output."""
        parts = read(experts[0])
        (n, k), device = parts[0].shape, parts[0].device
        scales = torch.empty(len(experts), len(parts), n, 1, dtype=torch.float32, device=device)
        values = torch.empty(len(experts), len(parts), n, k, dtype=FP8, device=device)
        for index, expert in enumerate(experts):
            for place, part in enumerate(read(expert) if index > 0 else parts):
                values[index, place], scales[index, place, :, 0] = quantize_rows(part)
        return Fp8Matrix(values.flatten(1, 2), scales, 1, k)

    def _read_scales(self, part: StoredPart) -> torch.Tensor:
        """Read the scales: [outputs of this rank]."""
        name = part.need(*_SCALES)
        if self.weights == "row":
            return part.per_row(name)
        return part.scalar(name).expand(len(part.rows))

    def _read_input_scale(self, parts: Sequence[StoredPart]) -> torch.Tensor | None:
        """Return the parts' largest scale: they share one input, and a larger scale covers a smaller one's range."""
        if self.activations != "static":
            return None
        scales = [part.scalar(part.need(*_INPUT_SCALES)) for part in parts]
        return torch.stack(scales).amax()


ON_LOAD = Fp8("row", "token", is_stored=False)


def parse(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method fp8, as transformers, AutoFP8 and vLLM write them."""
    if fields.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):  # the last: MiniMax-M2
        raise ModelError(f"{fields.where}: fmt {fields.get('fmt')!r} is not supported: supported is 'e4m3'")
    activations = fields.get("activation_scheme") or "dynamic"
    if activations not in ("dynamic", "static"):
        raise ModelError(
            f"{fields.where}: activation_scheme {activations!r} is not supported: supported are 'dynamic' and 'static'"
        )
    field = "ignored_layers" if fields.get("modules_to_not_convert") is None else "modules_to_not_convert"
    ignored = LayerNames.parse(fields.get(field), where=f"{fields.where}: {field}")
    scheme: Scheme = Fp8("tensor", "static" if activations == "static" else "token", is_stored=True)
    if fields.get("weight_block_size") is not None:
        scheme = _parse_blocks(fields, activations)
    return QuantizationConfig.of_all("fp8", scheme, ignored=ignored)


def _parse_blocks(fields: Fields, activations: str) -> Fp8Block:
    size = fields.get("weight_block_size")
    is_pair = isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
    if not is_pair or size[1] not in Fp8Block.COLUMNS:
        widths = ", ".join(map(str, Fp8Block.COLUMNS))
        raise ModelError(
            f"{fields.where}: weight_block_size must be two sizes, the second one of {widths}, found {size!r}"
        )
    if activations != "dynamic":
        raise ModelError(f"{fields.where}: weight_block_size with activation_scheme {activations!r} is not supported")
    return Fp8Block(size[0], size[1])
