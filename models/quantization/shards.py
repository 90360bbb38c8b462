"""StoredPart: this rank's share of a projection in the checkpoint. Schemes read their tensors through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from models.errors import ModelError
from models.quantization.linear_method import LinearPart
from models.weights.checkpoint import FLOATING
from models.weights.headers import ONE_NUMBER, ExpectedTensor, TensorForm
from models.weights.weights import Weights

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_dense(w: Weights, part: LinearPart) -> torch.Tensor:
    """Read this rank's share of an unquantized matrix, [outputs, inputs], in the model's dtype."""
    shape = (part.out_features, part.in_features)
    return (w / part.name).shard("weight", shape, dim=part.dim, rank=part.rank, size=part.size)


def expected_dense(part: StoredPart) -> list[ExpectedTensor]:
    """Return what read_dense() reads."""
    return [ExpectedTensor.of("weight", (part.num_rows, part.num_columns), dtypes=FLOATING)]


def expected_per_row(part: StoredPart, *names: str) -> ExpectedTensor:
    """Return what StoredPart.per_row() reads under the first of these names."""
    shapes = ((part.num_rows,), (part.num_rows, 1))
    return ExpectedTensor(tuple(TensorForm(name, shapes, SCALE_DTYPES) for name in names))


def expected_number(*names: str, is_needed: bool = True) -> ExpectedTensor:
    """Return what StoredPart.scalar() reads under the first of these names."""
    return ExpectedTensor(tuple(TensorForm(name, ONE_NUMBER, SCALE_DTYPES) for name in names), is_needed)


def part_of_expert(w: Weights, experts: range, parts: Sequence[LinearPart]) -> Callable[[int], StoredPart]:
    """Return what finds a part of an expert by its index: the parts of the first expert, those of the second …"""
    return lambda index: StoredPart.locate(w / f"experts.{experts[index // len(parts)]}", parts[index % len(parts)])


def check_scales(
    scales: torch.Tensor, part_of: Callable[[int], StoredPart], *names: str, is_signed: bool = False
) -> None:
    """Raise ModelError if a scale is not a finite number, or negative; 0 is that of a block of zeros.

    scales: [N, …], of N matrices, each that of part_of(its index), which has the first of `names` that is stored.
    is_signed: negative ones are let in: AutoRound writes them for symmetric integers. Waits for the device once.
    """
    least, largest = scales.aminmax()  # NaN if one is
    if bool((least > -math.inf if is_signed else least >= 0.0) & (largest < math.inf)):
        return
    is_number = scales.isfinite() if is_signed else (scales >= 0.0) & (scales < math.inf)
    index = int(is_number.flatten(1).all(1).logical_not().nonzero()[0])
    part, wrong = part_of(index), scales[index][is_number[index].logical_not()]
    fault = "no finite numbers" if is_signed else "negative or no finite numbers"
    raise ModelError(
        f"tensor {part.w.full_name(part.need(*names))} has {wrong.numel()} scales that are {fault},"
        f" the first {float(wrong.flatten()[0])}"
    )


def check_each(
    scales: Sequence[torch.Tensor], parts: Sequence[StoredPart], *names: str, is_signed: bool = False
) -> None:
    """Check the scales of each part of a linear layer; see check_scales."""
    for part_scales, part in zip(scales, parts, strict=True):
        check_scales(part_scales[None], [part].__getitem__, *names, is_signed=is_signed)


def merge_outputs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the outputs; 8-bit floats as bytes, since not every device can concatenate them."""
    if len(parts) == 1:
        return parts[0].contiguous()
    if parts[0].dtype.itemsize == 1:
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.cat(list(parts))


@dataclass(frozen=True)
class StoredPart:
    """A range of rows and of columns of one stored matrix, whose tensors have names below w."""

    w: Weights
    name: str  # full name of the matrix
    num_rows: int  # of the whole matrix
    num_columns: int
    rows: range  # this rank's rows
    columns: range

    @classmethod
    def locate(cls, w: Weights, part: LinearPart) -> StoredPart:
        """Find a part's stored matrix, which may be a merged one."""
        projection = w.projection(part.name, part.out_features)
        first_row = projection.first_output + (part.rank * part.outputs if part.dim == 0 else 0)
        first_column = part.rank * part.inputs if part.dim == 1 else 0
        return cls(
            w=projection.w,
            name=projection.name,
            num_rows=projection.num_outputs,
            num_columns=part.in_features,
            rows=range(first_row, first_row + part.outputs),
            columns=range(first_column, first_column + part.inputs),
        )

    def find(self, *names: str) -> str | None:
        """Return the first of these tensor names that the checkpoint has, or None."""
        return next((name for name in names if self.w.shape_of(name) is not None), None)

    def need(self, *names: str) -> str:
        """Return the first of these tensor names that the checkpoint has. Raises ModelError naming the first."""
        found = self.find(*names)
        if found is None:
            self.w.stored(names[0], (), SCALE_DTYPES)  # the reader's error names the folder
        return found or names[0]

    def matrix(self, name: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        """Read this rank's [outputs, inputs] of a tensor with one value per weight."""
        return self.band(name, (self.num_rows, self.num_columns), self.rows, self.columns, dtypes)

    def band(
        self, name: str, shape: tuple[int, int], rows: range, columns: range, dtypes: tuple[torch.dtype, ...]
    ) -> torch.Tensor:
        """Read [rows, columns] of a tensor of this shape; one of the two ranges is cut while reading the file."""
        if len(rows) < shape[0]:
            part = self.w.stored(name, shape, dtypes, dim=0, start=rows.start, stop=rows.stop)
            return part if len(columns) == shape[1] else part[:, columns.start : columns.stop].contiguous()
        return self.w.stored(name, shape, dtypes, dim=1, start=columns.start, stop=columns.stop)

    def per_row(self, name: str, dtypes: tuple[torch.dtype, ...] = SCALE_DTYPES) -> torch.Tensor:
        """Read [outputs of this rank] fp32 from a tensor [out] or [out, 1]."""
        shape = self.w.shape_of(name)
        stored = shape if shape == (self.num_rows, 1) else (self.num_rows,)
        values = self.w.stored(name, stored, dtypes, start=self.rows.start, stop=self.rows.stop)
        return values.float().flatten()

    def scalar(self, name: str, dtypes: tuple[torch.dtype, ...] = SCALE_DTYPES) -> torch.Tensor:
        """Read one positive number as [] fp32. Waits for the device."""
        shape = self.w.shape_of(name)
        stored = shape if shape is not None and all(size == 1 for size in shape) else ()
        value = self.w.stored(name, stored, dtypes).float().reshape(())
        if not 0.0 < float(value) < math.inf:
            raise ModelError(
                f"tensor {self.w.full_name(name)} is {float(value)}, and a scale must be a positive number"
            )
        return value
