"""MXFP4 experts of quant_method mxfp4: 4-bit floats in blocks of 32 inputs, a power of two as scale (gpt-oss).

The weights stay packed on the device; activations keep their dtype. All other layers of such a checkpoint are 16-bit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kernels.moe.storage import MXFP4_BLOCK, Mxfp4Matrix
from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import LayerNames, QuantizationConfig, Rule
from models.quantization.linear_method import LinearMethod, LinearPart
from models.weights.weights import Weights

_BYTES = MXFP4_BLOCK // 2  # of a block
# Of random weights: codes have a root mean square of 3, so 2 ** -7 makes them as wide as other random weights
_RANDOM_SCALE = 127 - 7


@dataclass(frozen=True)
class Mxfp4:
    """Scheme of experts, and their AllExperts."""

    output_multiple: int = 1
    input_multiple: int = MXFP4_BLOCK

    def describe(self) -> str:
        """See Scheme.describe."""
        return f"mxfp4 (e2m1; scales: powers of two by {MXFP4_BLOCK} inputs)"

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """See Scheme.matrix_bytes."""
        return out_features * (in_features // 2 + in_features // MXFP4_BLOCK)

    def make_method(self) -> LinearMethod:
        """Raise ModelError: linear layers are not stored so."""
        raise ModelError(f"{self.describe()} is not supported for linear layers, only for experts")

    def load_all(self, w: Weights, num_experts: int, part: LinearPart, *, takes_turns: bool) -> Mxfp4Matrix:
        """Read `<part>_blocks` [E, out, in / 32, 16] and `<part>_scales` [E, out, in / 32]; see AllExperts."""
        name = w.full_name(part.name)
        if part.in_features % MXFP4_BLOCK != 0:
            raise ModelError(f"{name}: {part.in_features} inputs are no multiple of {MXFP4_BLOCK}, a block of mxfp4")
        shape = (num_experts, part.out_features, part.in_features // MXFP4_BLOCK)
        width = shape[1 + part.dim] // part.size
        share = {"dim": 1 + part.dim, "start": part.rank * width, "stop": (part.rank + 1) * width}
        # the small tensor first: without it, or with another shape, no block is read
        scales = w.stored(f"{part.name}_scales", shape, (torch.uint8,), **share)
        if w.is_random:
            scales.fill_(_RANDOM_SCALE)
        blocks = w.stored(f"{part.name}_blocks", (*shape, _BYTES), (torch.uint8,), **share).flatten(2)
        if takes_turns:
            scales, blocks = (_gates_first(each) for each in (scales, blocks))
        return Mxfp4Matrix(blocks.contiguous(), scales.contiguous())


def parse(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method mxfp4, which speaks of experts only."""
    where = f"{fields.where}: modules_to_not_convert"
    names = LayerNames.parse(fields.get("modules_to_not_convert"), where=where)
    ignored = LayerNames(tuple(_as_pattern(name) for name in names.patterns))
    experts = LayerNames((r"re:.*\.experts(\.|$)",))
    return QuantizationConfig("mxfp4", (Rule(experts, Mxfp4()),), ignored)


def _gates_first(values: torch.Tensor) -> torch.Tensor:
    """Reorder outputs: [E, 2 * I, …], even ones first."""
    return values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _as_pattern(name: str) -> str:
    """Return the LayerNames pattern of a name in which a * stands for one component."""
    if name.startswith("re:") or "*" not in name:
        return name
    return "re:" + r"[^.]+".join(map(re.escape, name.split("*"))) + r"(\.|$)"
