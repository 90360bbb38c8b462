"""Scheme of quant_method awq, version gemm (Lin et al. 2023, arXiv:2306.00978), in AutoAWQ's file format.

qweight [K, N / 8] int32, qzeros [G, N / 8] int32, scales [G, N] fp16. The nibbles of a word, from the lowest, are
outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import LayerNames, QuantizationConfig
from models.quantization.integers import (
    INT32,
    IntPart,
    check_aligned,
    describe_groups,
    group_band,
    int_matrix_bytes,
    make_int_method,
    read_bits,
    read_group_size,
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

_PER_WORD = 8
# The nibble index of each output in a word
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq:
    """Scheme: 4 bits, with zero points."""

    group_size: int | None
    bits: int = 4
    is_symmetric: bool = False
    has_order: bool = False
    has_model_scales: bool = False
    output_multiple: int = _PER_WORD

    @property
    def input_multiple(self) -> int:
        """See Scheme."""
        return self.group_size or 1

    matrix_bytes = int_matrix_bytes
    make_method = make_int_method
    load_each = load_int_experts
    experts_limit = int_experts_limit
    expert_bytes = int_experts_bytes
    planes_bytes = int_experts_planes_bytes

    def describe(self) -> str:
        """See Scheme.describe."""
        return f"awq ({describe_groups(self.bits, self.group_size)})"

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """See Scheme.expected."""
        check_aligned(part, outputs=_PER_WORD)
        num_groups, _ = group_band(part, self.group_size)
        num_words = part.num_rows // _PER_WORD
        return [
            ExpectedTensor.of("scales", (num_groups, part.num_rows), dtypes=SCALE_DTYPES),
            ExpectedTensor.of("qzeros", (num_groups, num_words), dtypes=INT32),
            ExpectedTensor.of("qweight", (part.num_columns, num_words), dtypes=INT32),
        ]

    def read(self, part: StoredPart) -> IntPart:
        """See IntScheme.read."""
        check_aligned(part, outputs=_PER_WORD)
        num_groups, groups = group_band(part, self.group_size)
        words = range(part.rows.start // _PER_WORD, part.rows.stop // _PER_WORD)
        num_words = part.num_rows // _PER_WORD
        # the small tensors first: without them, or with other shapes, no weight is read
        scales = part.band("scales", (num_groups, part.num_rows), groups, part.rows, SCALE_DTYPES)
        zeros = part.band("qzeros", (num_groups, num_words), groups, words, INT32)
        codes = part.band("qweight", (part.num_columns, num_words), part.columns, words, INT32)
        return IntPart(_unpack(codes).T, scales, _unpack(zeros))


def parse(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method awq."""
    version = fields.get("version") or fields.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ModelError(f"{fields.where}: version {version!r} is not supported: supported is 'gemm'")
    names = [("w_bit", "q_group_size"), ("bits", "group_size")]  # field names in AutoAWQ's own file, and in config.json
    bits_name, group_name = names[fields.get("w_bit") is None]
    read_bits(fields, bits_name, supported=(4,))
    ignored = LayerNames.parse(fields.get("modules_to_not_convert"), where=f"{fields.where}: modules_to_not_convert")
    return QuantizationConfig.of_all("awq", Awq(read_group_size(fields, group_name)), ignored=ignored)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """[A, B] int32 → [A, 8 * B] uint8."""
    nibbles = unpack_words(words, 4).unflatten(1, (-1, _PER_WORD))
    return nibbles[:, :, list(_NIBBLES)].flatten(1)
