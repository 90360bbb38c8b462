"""Scheme of quant_method gptq (Frantar et al. 2022, arXiv:2210.17323), in AutoGPTQ's and GPTQModel's file format.

qweight [K * bits / 32, N] int32, qzeros [G, N * bits / 32] int32, scales [G, N] fp16, g_idx [K] int32: the group of
each input; with desc_act, inputs of a group are scattered. The integers of a word are neighbours, the first in the
lowest bits. Zero points are stored minus 1, except with checkpoint_format gptq_v2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import LayerNames, QuantizationConfig, Rule
from models.quantization.integers import (
    INT32,
    ORDER_DTYPES,
    IntPart,
    check_aligned,
    describe_groups,
    group_band,
    int_matrix_bytes,
    make_int_method,
    read_bits,
    read_group_size,
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

# The value that GPTQModel adds to a word of zero points (convert_gptq_v1_to_v2_format), carries included
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Gptq:
    """Scheme: 4 or 8 bits with zero points; symmetric checkpoints have them in the middle of the range."""

    bits: int
    group_size: int | None
    has_order: bool  # desc_act
    is_v2: bool
    is_symmetric: bool = True  # zero points are in the middle of the range; they are stored all the same
    has_model_scales: bool = False

    @property
    def output_multiple(self) -> int:
        """See Scheme."""
        return 32 // self.bits

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
        return f"gptq ({describe_groups(self.bits, self.group_size)}{', desc_act' if self.has_order else ''})"

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        per_word = 32 // self.bits
        check_aligned(part, outputs=per_word, inputs=per_word)
        num_groups, _ = group_band(part, self.group_size)
        return [
            ExpectedTensor.of("g_idx", (part.num_columns,), dtypes=ORDER_DTYPES, is_needed=self.has_order),
            ExpectedTensor.of("scales", (num_groups, part.num_rows), dtypes=SCALE_DTYPES),
            ExpectedTensor.of("qzeros", (num_groups, part.num_rows // per_word), dtypes=INT32),
            ExpectedTensor.of("qweight", (part.num_columns // per_word, part.num_rows), dtypes=INT32),
            ExpectedTensor.of("bias", (part.num_rows,), dtypes=SCALE_DTYPES, is_needed=False),
        ]

    def read(self, part: StoredPart) -> IntPart:
        """See IntScheme.read."""
        per_word = 32 // self.bits
        check_aligned(part, outputs=per_word, inputs=per_word)
        num_groups, groups = group_band(part, self.group_size)
        group_of = read_order(part, "g_idx", self.group_size, is_needed=self.has_order)
        if group_of is not None:
            groups = range(num_groups)
        row_words, column_words = (
            range(share.start // per_word, share.stop // per_word) for share in (part.rows, part.columns)
        )
        # the small tensors first: without them, or with other shapes, no weight is read
        scales = part.band("scales", (num_groups, part.num_rows), groups, part.rows, SCALE_DTYPES)
        zeros = part.band("qzeros", (num_groups, part.num_rows // per_word), groups, row_words, INT32)
        codes = part.band("qweight", (part.num_columns // per_word, part.num_rows), column_words, part.rows, INT32)
        return IntPart(
            codes=unpack_words(codes.T, self.bits),
            scales=scales,
            zeros=unpack_words(zeros if self.is_v2 else zeros + _ONES[self.bits], self.bits),
            group_of=group_of,
            bias=_read_bias(part),
        )


def parse(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method gptq."""
    format_ = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if format_ not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"{fields.where}: checkpoint_format {format_!r} is not supported: supported are 'gptq' and 'gptq_v2'"
        )
    for name, supported in (("is_marlin_format", (None, False)), ("pack_dtype", (None, "int32"))):
        if fields.get(name) not in supported:
            raise ModelError(f"{fields.where}: {name} {fields.get(name)!r} is not supported")
    if fields.flag("lm_head"):
        raise ModelError(f"{fields.where}: lm_head true is not supported: the output matrix must be unquantized")
    scheme = Gptq(
        bits=read_bits(fields),
        group_size=read_group_size(fields),
        has_order=fields.flag("desc_act"),
        is_v2=format_ == "gptq_v2",
        is_symmetric=fields.flag("sym", default=True),
    )
    rules, skipped = _read_dynamic(fields, scheme)
    blocks = fields.get("modules_in_block_to_quantize")
    if isinstance(blocks, list) and all(isinstance(block, list) for block in blocks):
        blocks = [name for block in blocks for name in block]
    layers = LayerNames.parse(blocks, where=f"{fields.where}: modules_in_block_to_quantize")
    if not layers.patterns:
        layers = LayerNames(has_all=True)
    excepted = LayerNames.parse(fields.get("modules_to_not_convert"), where=f"{fields.where}: modules_to_not_convert")
    ignored = LayerNames(excepted.patterns + skipped.patterns)
    return QuantizationConfig("gptq", (*rules, Rule(layers, scheme)), ignored)


def _read_dynamic(fields: Fields, scheme: Gptq) -> tuple[list[Rule], LayerNames]:
    """Read GPTQModel's exceptions, by regular expressions: "-:…" is unquantised, "+:…" or "…" has other settings."""
    dynamic = fields.get("dynamic") or {}
    where = f"{fields.where}: dynamic"
    if not isinstance(dynamic, Mapping) or not all(isinstance(found, Mapping) for found in dynamic.values()):
        raise ModelError(f"{where} must be an object of objects, found {dynamic!r}")
    rules, skipped = [], []
    for pattern, raw in dynamic.items():
        expression = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
        if pattern.startswith("-:"):
            skipped.append(expression)
            continue
        own = Fields(raw, f"{where} {pattern}")
        changed = dataclasses.replace(
            scheme,
            bits=scheme.bits if own.get("bits") is None else read_bits(own),
            group_size=scheme.group_size if own.get("group_size") is None else read_group_size(own),
            has_order=own.flag("desc_act", default=scheme.has_order),
            is_symmetric=own.flag("sym", default=scheme.is_symmetric),
        )
        rules.append(Rule(LayerNames.parse([expression], where=where), changed))
    return rules, LayerNames.parse(skipped, where=where)


def _read_bias(part: StoredPart) -> torch.Tensor | None:
    """Read the bias that old AutoGPTQ wrote for every layer: zeros if the model has none."""
    if part.find("bias") is None:
        return None
    rows = part.rows
    bias = part.w.stored("bias", (part.num_rows,), SCALE_DTYPES, start=rows.start, stop=rows.stop)
    return bias if bool(bias.any()) else None
