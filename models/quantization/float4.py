"""4-bit floats, MXFP4 and NVFP4, in the forms of checkpoints: linear layers, and experts stored by themselves.

Activations keep the model's dtype: Hopper has no units for 4-bit floats.

A matrix has its codes, two per byte (`weight_packed`, `weight`, or `weight_blocks`, which has the bytes of a block as
its last dimension), and a scale for each block of a row (`weight_scale`, `weight_scales`): uint8 exponents (MXFP4) or
e4m3 (NVFP4). NVFP4 has a factor of the whole matrix, too: compressed-tensors stores its inverse
(`weight_global_scale`), ModelOpt the factor (`weight_scale_2`). Scales of activations, which other servers round to 4
bits, are checked and not used. See kernels/linear/float4.py for the product.

parse_modelopt reads the quantization_config of ModelOpt: NVFP4, and FP8 with a scale per tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.e2m1 import E8M0_BIAS, E8M0_NAN, MXFP4_BLOCK, NVFP4_BLOCK, quantize_mxfp4, quantize_nvfp4
from kernels.linear.float4 import Float4Weight, float4_weight_bytes, make_float4_weight
from kernels.linear.ops import Float4Linear
from kernels.linear.planes import Float4Planes, can_arrange_float4, make_float4_planes
from kernels.linear.reference import FP8
from kernels.moe.planes import mxfp4_planes_bytes, nvfp4_planes_bytes, takes_planes
from kernels.moe.storage import Mxfp4Matrix
from kernels.moe.storage_nvfp4 import Nvfp4Matrix
from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import LayerNames, QuantizationConfig, Scheme
from models.quantization.fp8 import Fp8
from models.quantization.linear_method import LinearPart
from models.quantization.shards import StoredPart, expected_number, merge_outputs, read_dense
from models.weights.headers import ExpectedTensor, TensorForm
from models.weights.weights import Weights

_CODES = ("weight_packed", "weight_blocks", "weight")
_SCALES = ("weight_scale", "weight_scales")
_FACTORS = ("weight_global_scale", "weight_scale_2")
_INPUT_SCALES = ("input_global_scale", "input_scale")
# Of random experts: codes have a root mean square of 3, so 2 ** -7 makes them as wide as other random weights
_RANDOM_EXPONENT = -7
_MOST_E4M3 = 126  # as a byte: 448; above are NaN and the negative numbers


@dataclass(frozen=True)
class Float4:
    """Scheme: 4-bit floats (e2m1) with a scale per block of a row."""

    kind: Literal["mxfp4", "nvfp4"]
    output_multiple: int = 1

    @property
    def input_multiple(self) -> int:
        """Return the inputs of a block: one rank holds each."""
        return MXFP4_BLOCK if self.kind == "mxfp4" else NVFP4_BLOCK

    def describe(self) -> str:
        """See Scheme.describe."""
        if self.kind == "mxfp4":
            return f"mxfp4 (e2m1; scales: powers of two by {MXFP4_BLOCK} inputs)"
        return f"nvfp4 (e2m1; scales: e4m3 by {NVFP4_BLOCK} inputs, one factor)"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return float4_weight_bytes(out_features, in_features, self.input_multiple)

    @property
    def expert_block(self) -> int:
        """See HasExpertBlocks."""
        return self.input_multiple

    def experts_limit(self) -> str | None:
        """See PackedExperts.experts_limit: there is none."""
        return None

    def expert_bytes(self, out_features: int, in_features: int) -> int:
        """See PackedExperts.expert_bytes."""
        factor_bytes = 4 if self.kind == "nvfp4" else 0
        return out_features * (in_features // 2 + in_features // self.input_multiple) + factor_bytes

    def planes_bytes(self, out_features: int, in_features: int) -> int:
        """See ArrangedExperts.planes_bytes."""
        num_bytes = mxfp4_planes_bytes if self.kind == "mxfp4" else nvfp4_planes_bytes
        return num_bytes(out_features, in_features)

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        _check_columns(part, self)
        n, block = part.num_rows, self.input_multiple
        num_blocks = part.num_columns // block
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_CODES, (n, part.num_columns // 2))
        shapes["weight_blocks"] = (n, num_blocks, block // 2)
        dtypes = (torch.uint8,) if self.kind == "mxfp4" else (FP8,)
        tensors = [
            *(expected_number(name, is_needed=False) for name in _INPUT_SCALES),
            ExpectedTensor(tuple(TensorForm(name, ((n, num_blocks),), dtypes) for name in _SCALES)),
            ExpectedTensor(tuple(TensorForm(name, (shapes[name],), (torch.uint8,)) for name in _CODES)),
        ]
        return tensors if self.kind == "mxfp4" else [*tensors, expected_number(*_FACTORS)]

    def make_method(self) -> Float4Method:
        """See Scheme.make_method."""
        return Float4Method(self)

    def load_each(self, w: Weights, experts: range, parts: Sequence[LinearPart]) -> Mxfp4Matrix | Nvfp4Matrix:
        """Read each part of each expert, all scales first; see EachExpert.load_each. Each part keeps its own factor."""
        n, k = parts[0].outputs, parts[0].inputs
        shape, device = (len(experts), len(parts), n), w.device
        dtype = torch.uint8 if self.kind == "mxfp4" else FP8
        codes = torch.empty(*shape, k // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(*shape, k // self.input_multiple, dtype=dtype, device=device)
        scales.fill_(1.0 if self.kind == "nvfp4" else _RANDOM_EXPONENT + E8M0_BIAS)
        factors = torch.full(shape[:2], 2.0**_RANDOM_EXPONENT, dtype=torch.float32, device=device)
        stored = [[StoredPart.locate(w / f"experts.{expert}", part) for part in parts] for expert in experts]
        for index, row in enumerate(stored):
            for place, part in enumerate(row):
                _check_columns(part, self)
                if not w.is_random:
                    scales[index, place], factors[index, place] = _read_scales(part, self), _read_factor(part, self)
        for index, row in enumerate(stored):
            for place, part in enumerate(row):
                codes[index, place] = _read_codes(part, self.input_multiple)
        if self.kind == "mxfp4":
            return Mxfp4Matrix(codes.flatten(1, 2), scales.flatten(1, 2))
        return Nvfp4Matrix(codes.flatten(1, 2), scales.flatten(1, 2), factors)


@dataclass(frozen=True)
class Float4Part:
    """This rank's share of a matrix, as make_float4_weight takes it."""

    # [outputs, inputs / 2] uint8
    packed: torch.Tensor
    # [outputs, inputs / 32] uint8, or [outputs, inputs / 16] e4m3
    scales: torch.Tensor
    # [] fp32
    factor: torch.Tensor


class Float4Method:
    """LinearMethod of Float4."""

    def __init__(self, scheme: Float4) -> None:
        self._scheme = scheme
        self._linear = Float4Linear()

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> Float4Weight | Float4Planes:
        """See LinearMethod.load. Each part keeps its own factor. In planes on the devices that take experts so."""
        stored = [StoredPart.locate(w, part) for part in parts]
        for part in stored:
            _check_columns(part, self._scheme)
        if w.is_random:
            read = [_round(read_dense(w, part), self._scheme) for part in parts]
        else:
            read = [self._read(part) for part in stored]
        factors = [each.factor.expand(each.packed.shape[0]) for each in read]
        packed, scales = merge_outputs([each.packed for each in read]), merge_outputs([each.scales for each in read])
        if takes_planes(w.dtype, w.device, is_integer=False) and can_arrange_float4(scales):
            return make_float4_planes(packed, scales, torch.cat(factors))
        return make_float4_weight(packed, scales, torch.cat(factors), w.dtype)

    def apply(self, params: Float4Weight | Float4Planes, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        return self._linear(x, params, bias)

    def _read(self, part: StoredPart) -> Float4Part:
        """Read the small tensors first: without them, or with wrong ones, no codes are read."""
        scales, factor = _read_scales(part, self._scheme), _read_factor(part, self._scheme)
        return Float4Part(_read_codes(part, self._scheme.input_multiple), scales, factor)


_ALGORITHMS: dict[str, Callable[[], Scheme]] = {
    "NVFP4": lambda: Float4("nvfp4"),
    "FP8": lambda: Fp8("tensor", "static", is_stored=True),
}


def parse_modelopt(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method modelopt (NVIDIA TensorRT Model Optimizer). Raises ModelError."""
    algorithm = fields.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        names = ", ".join(_ALGORITHMS)
        raise ModelError(f"{fields.where}: quant_algo {algorithm!r} is not supported: supported are {names}")
    field = "exclude_modules" if fields.get("ignore") is None else "ignore"
    parsed = LayerNames.parse(fields.get(field), where=f"{fields.where}: {field}")
    ignored = LayerNames(tuple(_as_pattern(name) for name in parsed.patterns))
    return QuantizationConfig.of_all("modelopt", _ALGORITHMS[algorithm](), ignored=ignored)


def _check_columns(part: StoredPart, scheme: Float4) -> None:
    if part.num_columns % scheme.input_multiple != 0:
        raise ModelError(
            f"{part.name}: its {part.num_columns} inputs are not a multiple of the blocks of {scheme.input_multiple}"
            f" of {scheme.kind}"
        )


def _round(dense: torch.Tensor, scheme: Float4) -> Float4Part:
    if scheme.kind == "mxfp4":
        return Float4Part(*quantize_mxfp4(dense), torch.ones((), device=dense.device))
    return Float4Part(*quantize_nvfp4(dense))


def _read_factor(part: StoredPart, scheme: Float4) -> torch.Tensor:
    """Read the factor of the whole matrix, [] fp32, 1 of mxfp4. Checks scales of activations, which have no use."""
    for name in _INPUT_SCALES:
        if part.find(name) is not None:
            part.scalar(name)
    if scheme.kind == "mxfp4":
        return torch.ones((), device=part.w.device)
    name = part.need(*_FACTORS)
    stored = part.scalar(name)
    return stored.reciprocal() if name == "weight_global_scale" else stored


def _read_scales(part: StoredPart, scheme: Float4) -> torch.Tensor:
    """Read the scales: [outputs of this rank, inputs of this rank / block]. Waits for the device."""
    block = scheme.input_multiple
    name = part.need(*_SCALES)
    shape = (part.num_rows, part.num_columns // block)
    columns = range(part.columns.start // block, part.columns.stop // block)
    dtypes, most = ((torch.uint8,), E8M0_NAN - 1) if scheme.kind == "mxfp4" else ((FP8,), _MOST_E4M3)
    scales = part.band(name, shape, part.rows, columns, dtypes)
    if bool((scales.view(torch.uint8) > most).any()):
        wrong = "not a number" if scheme.kind == "mxfp4" else "negative or not a number"
        raise ModelError(f"tensor {part.w.full_name(name)} has scales that are {wrong}")
    return scales


def _read_codes(part: StoredPart, block: int) -> torch.Tensor:
    """Read the codes: [outputs of this rank, inputs of this rank / 2]."""
    name = part.need(*_CODES)
    rows, columns, size = part.rows, part.columns, block // 2
    if name != "weight_blocks":
        halves = range(columns.start // 2, columns.stop // 2)
        return part.band(name, (part.num_rows, part.num_columns // 2), rows, halves, (torch.uint8,))
    shape = (part.num_rows, part.num_columns // block, size)
    codes = part.w.stored(name, shape, (torch.uint8,), start=rows.start, stop=rows.stop)
    return codes[:, columns.start // block : columns.stop // block].flatten(1).contiguous()


def _as_pattern(name: str) -> str:
    """Return the LayerNames pattern of a full name in which a * stands for any characters, dots among them."""
    if name.startswith("re:") or "*" not in name:
        return name
    return "re:" + ".*".join(map(re.escape, name.split("*"))) + r"(\.|$)"
