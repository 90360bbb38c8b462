"""The format pack-quantized of compressed-tensors checkpoints: integers in words, activations as they are.

weight_packed [N, K * bits / 32] int32, weight_scale [N, G], weight_zero_point [N * bits / 32, G] int32 (asymmetric),
weight_shape [2], and weight_g_idx [K] where groups are not of neighbours. The codes of a word are neighbours, the first
in the lowest bits; codes and zero points are stored plus 2^(bits - 1), which is what makes both unsigned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from models.errors import ModelError
from models.quantization.integers import (
    INT32,
    IntMethod,
    IntPart,
    describe_groups,
    group_band,
    int_matrix_bytes,
    read_order,
    unpack_words,
)
from models.quantization.shards import SCALE_DTYPES, StoredPart


@dataclass(frozen=True)
class PackQuantized:
    """Scheme: 4 or 8 bits."""

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

    def describe(self) -> str:
        """See Scheme.describe."""
        return f"pack-quantized ({describe_groups(self.bits, self.group_size)})"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return int_matrix_bytes(self, out_features, in_features)

    def make_method(self) -> IntMethod:
        """See Scheme.make_method."""
        return IntMethod(self)

    def read(self, part: StoredPart) -> IntPart:
        """See IntScheme.read."""
        _check_shape(part)
        num_groups, groups = group_band(part, self.group_size)
        group_of = read_order(part, "weight_g_idx", self.group_size, is_needed=self.has_order)
        if group_of is not None:
            groups = range(num_groups)
        per_word = 32 // self.bits
        words = _words_of(part.columns, per_word)
        packed = part.band("weight_packed", (part.num_rows, -(-part.num_columns // per_word)), part.rows, words, INT32)
        scales = part.band("weight_scale", (part.num_rows, num_groups), part.rows, groups, SCALE_DTYPES)
        return IntPart(
            codes=_cut(unpack_words(packed, self.bits), part.columns, per_word),
            scales=scales.T,
            zeros=None if self.is_symmetric else self._read_zeros(part, num_groups, groups),
            group_of=group_of,
        )

    def _read_zeros(self, part: StoredPart, num_groups: int, groups: range) -> torch.Tensor:
        """[G, N] uint8."""
        per_word = 32 // self.bits
        shape = (-(-part.num_rows // per_word), num_groups)
        packed = part.band("weight_zero_point", shape, _words_of(part.rows, per_word), groups, INT32)
        return _cut(unpack_words(packed.T, self.bits), part.rows, per_word)


def _words_of(share: range, per_word: int) -> range:
    """The words that hold a share of a matrix."""
    return range(share.start // per_word, -(-share.stop // per_word))


def _cut(codes: torch.Tensor, share: range, per_word: int) -> torch.Tensor:
    """The share's own columns of what was unpacked of its words."""
    first = share.start % per_word
    return codes[:, first : first + len(share)]


def _check_shape(part: StoredPart) -> None:
    """Raise ModelError unless weight_shape says what config.json does."""
    found = [int(size) for size in part.w.stored("weight_shape", (2,), (torch.int64, torch.int32))]
    if found != [part.num_rows, part.num_columns]:
        raise ModelError(
            f"tensor {part.w.full_name('weight_shape')} says {found}, but config.json means"
            f" {[part.num_rows, part.num_columns]}"
        )
