"""bitsandbytes schemes: 4-bit lookup-table and 8-bit integer weights, stored or quantised on load.

kernels/linear/reference.py defines the arithmetic. Checkpoints are those that transformers writes with bitsandbytes.
A 4-bit matrix has, below its own name: `weight` (4-bit table indices, flat), `weight.absmax` (scales of runs of 64
weights, flat), `weight.quant_map` (the lookup table) and `weight.quant_state.bitsandbytes__nf4` (JSON as bytes). If
scales are quantised too, `absmax` holds table indices, `nested_quant_map` their values, and `nested_absmax` one scale
per 256; they are dequantised here. An 8-bit matrix has `weight`, and `SCB`, the largest magnitude of each row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.linear.ops import Linear4Bit, linear_int8
from kernels.linear.reference import (
    BLOCK,
    Lut4Weight,
    lut4_weight_bytes,
    make_lut4_weight,
    quantize_int8,
    quantize_nf4,
)
from kernels.moe.planes import lut4_planes_bytes
from kernels.moe.storage_lut4 import TABLES, Lut4Matrix
from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import LayerNames, QuantizationConfig, Scheme
from models.quantization.linear_method import LinearPart, ReadExpert
from models.quantization.shards import (
    StoredPart,
    check_each,
    expected_dense,
    expected_per_row,
    merge_outputs,
    read_dense,
)
from models.weights.headers import ExpectedTensor, TensorForm
from models.weights.weights import Weights

# Storage dtypes of the packed indices, two per byte; the quantising program chooses one
_STORAGE = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class Bnb4Bit:
    """Scheme: 4-bit lookup-table indices, with a scale per 64 weights of a row."""

    kind: Literal["nf4", "fp4"]
    is_stored: bool  # False: weights are quantised while they are read
    storage: str = "uint8"
    output_multiple: int = 1
    input_multiple: int = BLOCK
    expert_block: int = BLOCK

    def describe(self) -> str:
        """See Scheme.describe."""
        return f"bitsandbytes {self.kind} (4 bits, scales by {BLOCK} inputs)"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return lut4_weight_bytes(out_features, in_features)

    def experts_limit(self) -> str | None:
        """See PackedExperts.experts_limit: there is none."""
        return None

    def expert_bytes(self, out_features: int, in_features: int) -> int:
        """See PackedExperts.expert_bytes."""
        return out_features * (in_features // 2 + 4 * in_features // BLOCK)

    def planes_bytes(self, out_features: int, in_features: int) -> int:
        """See ArrangedExperts.planes_bytes."""
        return lut4_planes_bytes(out_features, in_features)

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        if part.num_columns % BLOCK != 0:
            raise ModelError(f"{part.name}: its {part.num_columns} inputs are not a multiple of the blocks of {BLOCK}")
        if not self.is_stored:
            return expected_dense(part)
        dtype, num_scales = _STORAGE[self.storage], part.num_rows * part.num_columns // BLOCK
        state, fp32 = f"weight.quant_state.bitsandbytes__{self.kind}", (torch.float32,)
        nested, codes = "weight.nested_absmax", (torch.uint8,)
        return [
            ExpectedTensor((TensorForm(state, None, codes),)),
            ExpectedTensor((TensorForm("weight.absmax", ((num_scales,),), fp32),), without=nested),
            ExpectedTensor((TensorForm("weight.absmax", ((num_scales,),), codes),), beside=nested),
            ExpectedTensor((TensorForm(nested, None, fp32),), is_needed=False),  # its size is in the state
            ExpectedTensor((TensorForm("weight.nested_quant_map", ((256,),), fp32),), beside=nested),
            ExpectedTensor.of("weight.quant_map", (16,), dtypes=fp32),
            ExpectedTensor.of(
                "weight", (part.num_rows * (part.num_columns // 2 // dtype.itemsize), 1), dtypes=(dtype,)
            ),
        ]

    def make_method(self) -> Bnb4BitLinear:
        """See Scheme.make_method."""
        return Bnb4BitLinear(self)

    def load_each(self, w: Weights, experts: range, parts: Sequence[LinearPart]) -> Lut4Matrix:
        """Read each part of each expert, all scales first; see EachExpert.load_each."""
        if w.is_random:
            made = self.quantize_each(experts, lambda expert: [_checked(w / f"experts.{expert}", p) for p in parts])
            return Lut4Matrix(_nearest(made.packed, self.kind), made.scales, self.kind)
        stored = [[StoredPart.locate(w / f"experts.{expert}", part) for part in parts] for expert in experts]
        n, k = parts[0].outputs, parts[0].inputs
        scales = torch.empty(len(experts), len(parts), n, k // BLOCK, dtype=torch.float32, device=w.device)
        packed = torch.empty(len(experts), len(parts), n, k // 2, dtype=torch.uint8, device=w.device)
        table = torch.tensor(TABLES[self.kind], device=w.device)
        for index, row in enumerate(stored):
            for place, part in enumerate(row):
                first, last = part.columns.start // BLOCK, part.columns.stop // BLOCK
                scales[index, place] = _read_scales(part, _read_state(part, self.kind))[:, first:last]
                if not torch.equal(_read_table(part), table):
                    raise ModelError(f"{part.name}: its quant_map is not that of {self.kind}, as experts need it")
        for index, row in enumerate(stored):
            for place, part in enumerate(row):
                packed[index, place] = _read_packed(part, self.storage)
        return Lut4Matrix(packed.flatten(1, 2), scales.flatten(1, 2), self.kind)

    def quantize_each(self, experts: range, read: ReadExpert) -> Lut4Matrix:
        """See QuantizesExperts.quantize_each: as nf4."""
        parts = read(experts[0])
        (n, k), device = parts[0].shape, parts[0].device
        scales = torch.empty(len(experts), len(parts), n, k // BLOCK, dtype=torch.float32, device=device)
        packed = torch.empty(len(experts), len(parts), n, k // 2, dtype=torch.uint8, device=device)
        for index, expert in enumerate(experts):
            for place, part in enumerate(read(expert) if index > 0 else parts):
                packed[index, place], scales[index, place] = quantize_nf4(part)
        return Lut4Matrix(packed.flatten(1, 2), scales.flatten(1, 2), "nf4")


@dataclass(frozen=True)
class BnbInt8:
    """Scheme and its LinearMethod: 8-bit integers, with a scale per row.

    Activations are not rounded, so LLM.int8's outlier threshold is not needed.
    """

    is_stored: bool
    output_multiple: int = 1
    input_multiple: int = 1

    def describe(self) -> str:
        """See Scheme.describe."""
        return "bitsandbytes int8 (weights, scales by row)"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return out_features * in_features + 4 * out_features

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        if not self.is_stored:
            return expected_dense(part)
        return [
            ExpectedTensor.of("weight_format", (), dtypes=(torch.uint8,), is_needed=False),
            expected_per_row(part, "SCB"),
            ExpectedTensor.of("weight", (part.num_rows, part.num_columns), dtypes=(torch.int8,)),
        ]

    def make_method(self) -> BnbInt8:
        """See Scheme.make_method."""
        return self

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> Integers:
        """See LinearMethod.load."""
        if not self.is_stored or w.is_random:
            pairs = [quantize_int8(read_dense(w, part)) for part in parts]
        else:
            pairs = [self._read(StoredPart.locate(w, part)) for part in parts]
        values, largest = (merge_outputs([pair[i] for pair in pairs]) for i in range(2))
        return Integers(values, largest)

    def apply(self, params: Integers, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        return linear_int8(x, params.values, params.largest, bias)

    def _read(self, part: StoredPart) -> tuple[torch.Tensor, torch.Tensor]:
        if part.find("weight_format") is not None:
            layout = int(part.w.stored("weight_format", (), (torch.uint8,)))
            if layout != 0:
                raise ModelError(
                    f"tensor {part.w.full_name('weight_format')} is {layout}: only 0, row-major, is supported"
                )
        largest = part.per_row(part.need("SCB"))
        check_each([largest], [part], "SCB")
        return part.matrix("weight", (torch.int8,)), largest


NF4_ON_LOAD = Bnb4Bit("nf4", is_stored=False)
INT8_ON_LOAD = BnbInt8(is_stored=False)


@dataclass(frozen=True)
class Lut4Codes:
    """This rank's share of a 4-bit matrix, in bitsandbytes's layout."""

    # [out, in / 2] uint8: indices of two neighbours of a row, the first in the upper half
    packed: torch.Tensor
    # [out, in / 64] fp32
    scales: torch.Tensor
    # [16] fp32: the lookup table
    table: torch.Tensor


@dataclass(frozen=True)
class Integers:
    """8-bit parts merged along their outputs."""

    # [out, in] int8
    values: torch.Tensor
    # [out] fp32: largest magnitude of the row, the value of 127
    largest: torch.Tensor


class Bnb4BitLinear:
    """LinearMethod of Bnb4Bit."""

    def __init__(self, scheme: Bnb4Bit) -> None:
        self._scheme = scheme
        self._linear = Linear4Bit()

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> Lut4Weight:
        """See LinearMethod.load."""
        if not self._scheme.is_stored or w.is_random:
            kind = self._scheme.kind  # of random weights; on load it is nf4
            table = torch.tensor(TABLES[kind], device=w.device)
            rounded = [quantize_nf4(_checked(w, part)) for part in parts]
            codes = [Lut4Codes(_nearest(packed, kind), scales, table) for packed, scales in rounded]
        else:
            codes = [self._read(StoredPart.locate(w, part)) for part in parts]
        if not all(torch.equal(part.table, codes[0].table) for part in codes):
            raise ModelError(f"{w.full_name(parts[0].name)}: its quant_map differs from that of {parts[-1].name}")
        packed, scales = merge_outputs([part.packed for part in codes]), merge_outputs([part.scales for part in codes])
        return make_lut4_weight(packed, scales, codes[0].table, w.dtype)

    def apply(self, params: Lut4Weight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        return self._linear(x, params, bias)

    def _read(self, part: StoredPart) -> Lut4Codes:
        scheme = self._scheme
        state = _read_state(part, scheme.kind)
        packed, scales = _read_packed(part, scheme.storage), _read_scales(part, state)
        first, last = part.columns.start // BLOCK, part.columns.stop // BLOCK
        return Lut4Codes(packed=packed, scales=scales[:, first:last], table=_read_table(part))


def parse(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method bitsandbytes."""
    ignored = LayerNames.parse(fields.get("llm_int8_skip_modules"), where=f"{fields.where}: llm_int8_skip_modules")
    is_4bit, is_8bit = fields.flag("load_in_4bit"), fields.flag("load_in_8bit")
    if is_4bit == is_8bit:
        raise ModelError(f"{fields.where}: one of load_in_4bit and load_in_8bit must be true")
    if fields.flag("llm_int8_has_fp16_weight"):
        raise ModelError(f"{fields.where}: llm_int8_has_fp16_weight is not supported: only stored integers are read")
    if is_8bit:
        return QuantizationConfig.of_all("bitsandbytes-int8", BnbInt8(is_stored=True), ignored=ignored)
    quant_type = fields.get("bnb_4bit_quant_type") or "fp4"
    kind: Literal["nf4", "fp4"] = "nf4" if quant_type == "nf4" else "fp4"
    if quant_type != kind:
        raise ModelError(
            f"{fields.where}: bnb_4bit_quant_type {quant_type!r} is not supported: supported are 'nf4', 'fp4'"
        )
    storage = str(fields.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
    if storage not in _STORAGE:
        names = ", ".join(_STORAGE)
        raise ModelError(f"{fields.where}: bnb_4bit_quant_storage {storage!r} is not supported: supported are {names}")
    scheme: Scheme = Bnb4Bit(kind, is_stored=True, storage=storage)
    return QuantizationConfig.of_all(f"bitsandbytes-{kind}", scheme, ignored=ignored)


def _nearest(packed: torch.Tensor, kind: Literal["nf4", "fp4"]) -> torch.Tensor:
    """Return the indices of a kind's values that are nearest to nf4's, two a byte."""
    if kind == "nf4":
        return packed
    nf4, values = (torch.tensor(TABLES[each], device=packed.device) for each in ("nf4", kind))
    index = (nf4[:, None] - values).abs().argmin(1).to(torch.uint8)
    return (index[(packed >> 4).int()] << 4) | index[(packed & 15).int()]


def _checked(w: Weights, part: LinearPart) -> torch.Tensor:
    if part.in_features % BLOCK != 0:
        name = w.full_name(part.name)
        raise ModelError(f"{name}: its {part.in_features} inputs are not a multiple of the blocks of {BLOCK}")
    return read_dense(w, part)


def _read_state(part: StoredPart, kind: str) -> dict[str, Any]:
    """Read and check the JSON beside a 4-bit matrix."""
    name = part.need(f"weight.quant_state.bitsandbytes__{kind}")
    shape, where = part.w.shape_of(name) or (), f"tensor {part.w.full_name(name)}"
    try:
        state = json.loads(bytes(part.w.stored(name, shape, (torch.uint8,)).tolist()))
        found = (state["quant_type"], state["blocksize"], list(state["shape"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where}: malformed: {error!r}") from error
    wanted = (kind, BLOCK, [part.num_rows, part.num_columns])
    if found != wanted:
        raise ModelError(f"{where}: type, block size and shape are {found}, but config.json requires {wanted}")
    return state


def _read_packed(part: StoredPart, storage: str) -> torch.Tensor:
    """Read this rank's codes, [outputs, inputs / 2] uint8.

    In the file matrices are flat, but each row is a whole number of bytes and of scale blocks.
    """
    dtype = _STORAGE[storage]
    units = part.num_columns // 2 // dtype.itemsize
    flat = part.w.stored(
        part.need("weight"),
        (part.num_rows * units, 1),
        (dtype,),
        start=part.rows.start * units,
        stop=part.rows.stop * units,
    )
    packed = flat.flatten().view(torch.uint8).view(len(part.rows), -1)
    return packed[:, part.columns.start // 2 : part.columns.stop // 2]


def _read_table(part: StoredPart) -> torch.Tensor:
    return part.w.stored(part.need("weight.quant_map"), (16,), (torch.float32,))


def _read_scales(part: StoredPart, state: dict[str, Any]) -> torch.Tensor:
    """Read the scales: [outputs of this rank, inputs of the whole matrix / 64] fp32."""
    if part.num_columns % BLOCK != 0:
        raise ModelError(f"{part.name}: its {part.num_columns} inputs are not a multiple of the blocks of {BLOCK}")
    per_row = part.num_columns // BLOCK
    num_scales = part.num_rows * per_row
    name = part.need("weight.absmax")
    first, last = part.rows.start * per_row, part.rows.stop * per_row
    nested = part.find("weight.nested_absmax")
    if nested is None:
        scales = part.w.stored(name, (num_scales,), (torch.float32,), start=first, stop=last)
        check_each([scales], [part], name)
        return scales.view(len(part.rows), per_row)
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size <= 0 or not isinstance(offset, int | float):
        raise ModelError(f"{part.name}: nested_blocksize {size!r} or nested_offset {offset!r} is malformed")
    codes = part.w.stored(name, (num_scales,), (torch.uint8,), start=first, stop=last)
    values = part.w.stored(part.need("weight.nested_quant_map"), (256,), (torch.float32,))
    outer = part.w.stored(nested, (-(-num_scales // size),), (torch.float32,))
    check_each([outer], [part], nested)
    index = torch.arange(first, last, device=outer.device) // size
    return (values[codes.int()] * outer[index] + offset).view(len(part.rows), per_row)
