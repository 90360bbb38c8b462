"""Schemes of quant_method compressed-tensors (llm-compressor), whose config assigns a scheme to groups of layers.

Each supported group format is one row of FORMATS; its parser refuses settings that its scheme does not support.

PackQuantized is the scheme of format pack-quantized: packed integer weights, unquantised activations. Its tensors are
weight_packed [N, K * bits / 32] int32, weight_scale [N, G], weight_zero_point [N * bits / 32, G] int32 (asymmetric),
weight_shape [2], and weight_g_idx [K] if groups are not of neighbours. The integers of a word are neighbours, the first
in the lowest bits; integers and zero points are stored plus 2^(bits - 1), so both are unsigned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import LayerNames, QuantizationConfig, Rule, Scheme
from models.quantization.float4 import Float4
from models.quantization.fp8 import Fp8, Fp8Block
from models.quantization.int8 import Int8
from models.quantization.integers import (
    INT32,
    ORDER_DTYPES,
    IntPart,
    describe_groups,
    group_band,
    int_matrix_bytes,
    make_int_method,
    read_order,
    unpack_words,
)
from models.quantization.integers_experts import (
    int_experts_bytes,
    int_experts_limit,
    int_experts_planes_bytes,
    load_int_experts,
)
from models.quantization.shards import SCALE_DTYPES, StoredPart
from models.weights.headers import ExpectedTensor


@dataclass(frozen=True)
class PackQuantized:
    """Scheme: packed 4- or 8-bit integers."""

    bits: int
    group_size: int | None
    is_symmetric: bool
    has_order: bool
    has_model_scales: bool = True

    @property
    def output_multiple(self) -> int:
        """See Scheme."""
        return 1 if self.is_symmetric else 32 // self.bits

    @property
    def input_multiple(self) -> int:
        """See Scheme."""
        return 32 // self.bits if self.has_order else math.lcm(32 // self.bits, self.group_size or 1)

    matrix_bytes = int_matrix_bytes
    make_method = make_int_method
    load_each = load_int_experts
    experts_limit = int_experts_limit
    expert_bytes = int_experts_bytes
    planes_bytes = int_experts_planes_bytes

    def describe(self) -> str:
        """See Scheme.describe."""
        return f"pack-quantized ({describe_groups(self.bits, self.group_size)})"

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        num_groups, _ = group_band(part, self.group_size)
        per_word, n, k = 32 // self.bits, part.num_rows, part.num_columns
        tensors = [
            ExpectedTensor.of("weight_shape", (2,), dtypes=(torch.int64, torch.int32)),
            ExpectedTensor.of("weight_g_idx", (k,), dtypes=ORDER_DTYPES, is_needed=self.has_order),
            ExpectedTensor.of("weight_scale", (n, num_groups), dtypes=SCALE_DTYPES),
            ExpectedTensor.of("weight_packed", (n, -(-k // per_word)), dtypes=INT32),
        ]
        if not self.is_symmetric:
            tensors.append(ExpectedTensor.of("weight_zero_point", (-(-n // per_word), num_groups), dtypes=INT32))
        return tensors

    def read(self, part: StoredPart) -> IntPart:
        """See IntScheme.read."""
        _check_shape(part)
        num_groups, groups = group_band(part, self.group_size)
        group_of = read_order(part, "weight_g_idx", self.group_size, is_needed=self.has_order)
        if group_of is not None:
            groups = range(num_groups)
        per_word = 32 // self.bits
        words = _words_of(part.columns, per_word)
        # the small tensors first: without them, or with other shapes, no weight is read
        scales = part.band("weight_scale", (part.num_rows, num_groups), part.rows, groups, SCALE_DTYPES)
        zeros = None if self.is_symmetric else self._read_zeros(part, num_groups, groups)
        packed = part.band("weight_packed", (part.num_rows, -(-part.num_columns // per_word)), part.rows, words, INT32)
        return IntPart(
            codes=_cut(unpack_words(packed, self.bits), part.columns, per_word),
            scales=scales.T,
            zeros=zeros,
            group_of=group_of,
        )

    def _read_zeros(self, part: StoredPart, num_groups: int, groups: range) -> torch.Tensor:
        """Read the zero points: [G, N] uint8."""
        per_word = 32 // self.bits
        shape = (-(-part.num_rows // per_word), num_groups)
        packed = part.band("weight_zero_point", shape, _words_of(part.rows, per_word), groups, INT32)
        return _cut(unpack_words(packed.T, self.bits), part.rows, per_word)


def _words_of(share: range, per_word: int) -> range:
    """Return the range of words that contain a share of a matrix."""
    return range(share.start // per_word, -(-share.stop // per_word))


def _cut(codes: torch.Tensor, share: range, per_word: int) -> torch.Tensor:
    """Cut the share's own columns out of its unpacked words."""
    first = share.start % per_word
    return codes[:, first : first + len(share)]


def _check_shape(part: StoredPart) -> None:
    """Raise ModelError unless weight_shape equals the shape in config.json."""
    found = [int(size) for size in part.w.stored("weight_shape", (2,), (torch.int64, torch.int32))]
    if found != [part.num_rows, part.num_columns]:
        raise ModelError(
            f"tensor {part.w.full_name('weight_shape')} says {found}, but config.json requires"
            f" {[part.num_rows, part.num_columns]}"
        )


_EVERY_LAYER = ("Linear",)


@dataclass(frozen=True)
class Arguments:
    """Quantisation settings of one tensor of a group; null fields take the format's defaults."""

    fields: Fields
    num_bits: int
    type: str  # "int" or "float"
    strategy: str  # "tensor", "channel", "group", "block", "token", …
    group_size: int | None
    is_symmetric: bool
    dynamic: bool | str

    @classmethod
    def parse(cls, fields: Fields) -> Arguments:
        """Read `weights` or `input_activations` of a group."""
        group_size = fields.get("group_size")
        return cls(
            fields=fields,
            num_bits=fields.count("num_bits", default=8),
            type=_word(fields, "type", default="int"),
            strategy=_word(fields, "strategy", default="group" if group_size is not None else "tensor"),
            group_size=None if group_size in (None, -1) else fields.count("group_size"),
            is_symmetric=fields.flag("symmetric", default=True),
            dynamic=fields.get("dynamic") or False,
        )

    def refuse(self, what: str) -> ModelError:
        """Return a ModelError that says these settings are not supported."""
        kind = f"{self.num_bits}-bit {self.type}, by {self.strategy}, symmetric {self.is_symmetric}"
        return ModelError(f"{self.fields.where}: {what} ({kind}, dynamic {self.dynamic}) are not supported")


@dataclass(frozen=True)
class Group:
    """Layers with one set of quantisation settings."""

    where: str
    weights: Arguments
    activations: Arguments | None  # None: activations are not quantised


def parse(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method compressed-tensors."""
    if fields.get("quantization_status") not in (None, "compressed"):
        raise ModelError(f"{fields.where}: quantization_status {fields.get('quantization_status')!r} is not supported")
    if fields.section("sparsity_config").get("format") not in (None, "dense"):
        raise ModelError(f"{fields.where}: sparse checkpoints are not supported")
    groups = fields.get("config_groups")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or not all(isinstance(group, Mapping) for group in groups.values())
    ):
        raise ModelError(f"{fields.where}: config_groups must be an object of objects, found {groups!r}")
    if (transforms := fields.section("transform_config").get("config_groups")) is not None and transforms != {}:
        raise ModelError(f"{fields.where}: transform_config is not supported: served is null, found {transforms!r}")
    targets: dict[str, Scheme] = {}  # the last group with a target has it
    for name, raw in groups.items():
        group = Fields(raw, f"{fields.where}: config_groups {name}")
        format_ = group.get("format") or fields.get("format")
        if not isinstance(format_, str) or format_ not in FORMATS:
            raise ModelError(f"{group.where}: format {format_!r} is not supported: supported are {', '.join(FORMATS)}")
        scheme, where = FORMATS[format_](_read_group(group)), f"{group.where}: targets"
        names = LayerNames.parse(group.get("targets"), where=where).patterns
        if not names:
            raise ModelError(f"{where} must be a list of layer names, found {group.get('targets')!r}")
        targets |= dict.fromkeys(names, scheme)
    # neighbours of one scheme are one rule: each layer's name is looked for in all rules, and targets may be thousands
    rules = [
        Rule(LayerNames.parse(list(run), where=fields.where, everything=_EVERY_LAYER), scheme)
        for scheme, run in itertools.groupby(sorted(targets, key=_precedence), key=targets.__getitem__)
    ]
    ignored = LayerNames.parse(fields.get("ignore"), where=f"{fields.where}: ignore")
    return QuantizationConfig("compressed-tensors", tuple(rules), ignored)


def _precedence(target: str) -> tuple[bool, bool, str]:
    """Return the key by which targets decide: names, expressions, all layers (compressed-tensors, match_targets)."""
    return target in _EVERY_LAYER, target.startswith("re:"), target


def _word(fields: Fields, name: str, *, default: str) -> str:
    value = fields.get(name) or default
    if not isinstance(value, str):
        raise ModelError(f"{fields.where}: {name} must be a string, found {value!r}")
    return value


def _read_group(group: Fields) -> Group:
    if group.get("output_activations") is not None:
        raise ModelError(f"{group.where}: output_activations are not supported")
    weights = Arguments.parse(Fields(group.section("weights").raw, f"{group.where}: weights"))
    if group.get("input_activations") is None:
        return Group(group.where, weights, None)
    section = Fields(group.section("input_activations").raw, f"{group.where}: input_activations")
    return Group(group.where, weights, Arguments.parse(section))


def _blocks(group: Group) -> Scheme:
    """Make the scheme: 8-bit float weights by block, activations by token and groups of equally many columns."""
    weights, activations = group.weights, group.activations
    size = weights.fields.get("block_structure")
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise ModelError(f"{weights.fields.where}: block_structure must be two sizes, found {size!r}")
    if weights.type != "float" or weights.num_bits != 8 or size[1] not in Fp8Block.COLUMNS:
        raise weights.refuse("weights")
    if activations is None:
        raise ModelError(f"{group.where}: 8-bit float weights without 8-bit activations are not supported")
    kind = (activations.type, activations.num_bits, activations.strategy, activations.group_size, activations.dynamic)
    if kind != ("float", 8, "group", size[1], True):
        raise activations.refuse("activations")
    return Fp8Block(size[0], size[1])


def _float_quantized(group: Group) -> Scheme:
    """Make the scheme: 8-bit float weights by tensor or row; activations by token or static."""
    weights, activations = group.weights, group.activations
    if weights.strategy == "block":
        return _blocks(group)
    kinds: dict[str, Literal["tensor", "row"]] = {"tensor": "tensor", "channel": "row"}
    by = kinds.get(weights.strategy)
    if by is None or weights.type != "float" or weights.num_bits != 8 or not weights.is_symmetric or weights.dynamic:
        raise weights.refuse("weights")
    if activations is None:
        raise ModelError(f"{group.where}: 8-bit float weights without 8-bit activations are not supported")
    kind = (activations.type, activations.num_bits, activations.strategy, activations.is_symmetric, activations.dynamic)
    if kind in (("float", 8, "token", True, True), ("float", 8, "tensor", True, True)):
        return Fp8(by, "token", is_stored=True)
    if kind == ("float", 8, "tensor", True, False):
        return Fp8(by, "static", is_stored=True)
    raise activations.refuse("activations")


def _pack_quantized(group: Group) -> Scheme:
    """Make the scheme: 4- or 8-bit integers by row or group of inputs; unquantised activations."""
    weights = group.weights
    sizes = {"group": weights.group_size, "channel": None}
    is_known = weights.strategy in sizes and (weights.strategy == "channel" or weights.group_size is not None)
    if not is_known or weights.type != "int" or weights.num_bits not in (4, 8) or weights.dynamic:
        raise weights.refuse("weights")
    if group.activations is not None:
        raise group.activations.refuse("activations with packed weights")
    order = weights.fields.get("actorder")
    return PackQuantized(
        bits=weights.num_bits,
        group_size=sizes[weights.strategy],
        is_symmetric=weights.is_symmetric,
        has_order=order is True or order in ("group", "dynamic"),
    )


def _float4(group: Group, kind: Literal["mxfp4", "nvfp4"], strategy: str) -> Scheme:
    """Make the scheme: 4-bit floats by group of inputs; activations are not rounded, even where the format has it."""
    scheme, weights, activations = Float4(kind), group.weights, group.activations
    is_known = weights.strategy in (strategy, "group") and weights.group_size == scheme.input_multiple
    if not is_known or weights.type != "float" or weights.num_bits != 4 or not weights.is_symmetric or weights.dynamic:
        raise weights.refuse(f"weights in format {kind}")
    if activations is not None and (activations.type, activations.num_bits) != ("float", 4):
        raise activations.refuse(f"activations with {kind} weights")
    return scheme


def _int_quantized(group: Group) -> Scheme:
    """Make the scheme: 8-bit integer weights by tensor or row; activations by token or static."""
    weights, activations = group.weights, group.activations
    kinds: dict[str, Literal["tensor", "row"]] = {"tensor": "tensor", "channel": "row"}
    by = kinds.get(weights.strategy)
    if by is None or weights.type != "int" or weights.num_bits != 8 or not weights.is_symmetric or weights.dynamic:
        raise weights.refuse("weights")
    if activations is None:
        raise ModelError(f"{group.where}: 8-bit integer weights without 8-bit activations are not supported")
    kind = (activations.type, activations.num_bits, activations.strategy, activations.is_symmetric, activations.dynamic)
    if kind in (("int", 8, "token", True, True), ("int", 8, "tensor", True, True)):
        return Int8(by, "token")
    if kind == ("int", 8, "tensor", True, False):
        return Int8(by, "static")
    raise activations.refuse("activations")


FORMATS: dict[str, Callable[[Group], Scheme]] = {
    "int-quantized": _int_quantized,
    "float-quantized": _float_quantized,
    "mxfp4-pack-quantized": lambda group: _float4(group, "mxfp4", "group"),
    "nvfp4-pack-quantized": lambda group: _float4(group, "nvfp4", "tensor_group"),
    "pack-quantized": _pack_quantized,
}
