"""MXFP4 of quant_method mxfp4: 4-bit floats in blocks of 32 inputs, a power of two as scale (gpt-oss).

The weights stay packed on the device; activations keep their dtype. Experts are MXFP4. Linear layers are, too, but for
those of modules_to_not_convert; without that list they are 16-bit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from kernels.e2m1 import E8M0_NAN, MXFP4_BLOCK
from kernels.moe.planes import mxfp4_planes_bytes
from kernels.moe.storage import Mxfp4Matrix
from models.errors import ModelError
from models.fields import Fields
from models.parallel import ExpertShare
from models.quantization.config import LayerNames, QuantizationConfig, Rule
from models.quantization.float4 import Float4
from models.quantization.linear_method import LinearMethod, LinearPart
from models.quantization.shards import StoredPart
from models.weights.headers import ExpectedTensor
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

    def planes_bytes(self, out_features: int, in_features: int) -> int:
        """See ArrangedExperts.planes_bytes."""
        return mxfp4_planes_bytes(out_features, in_features)

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """Raise ModelError, as make_method() does: tensors of all experts are read by load_all()."""
        raise ModelError(f"{self.describe()} of experts is not supported for linear layers")

    def make_method(self) -> LinearMethod:
        """Raise ModelError: linear layers are not stored so, but as Float4."""
        raise ModelError(f"{self.describe()} of experts is not supported for linear layers")

    def load_all(self, w: Weights, share: ExpertShare, part: LinearPart, *, takes_turns: bool) -> Mxfp4Matrix:
        """Read `<part>_blocks` [E, out, in / 32, 16] and `<part>_scales` [E, out, in / 32]; see AllExperts."""
        name = w.full_name(part.name)
        if part.in_features % MXFP4_BLOCK != 0:
            raise ModelError(f"{name}: {part.in_features} inputs are no multiple of {MXFP4_BLOCK}, a block of mxfp4")
        shape = (share.num_experts, part.out_features, part.in_features // MXFP4_BLOCK)
        dim, start, stop = share.cut(1 + part.dim, shape[1 + part.dim])
        # the small tensor first: without it, or with another shape, no block is read
        scales = w.stored(f"{part.name}_scales", shape, (torch.uint8,), dim=dim, start=start, stop=stop)
        if w.is_random:
            scales.fill_(_RANDOM_SCALE)
        elif w.headers is None and bool((scales == E8M0_NAN).any()):
            raise ModelError(f"tensor {name}_scales has scales that are not a number")
        blocks = w.stored(f"{part.name}_blocks", (*shape, _BYTES), (torch.uint8,), dim=dim, start=start, stop=stop)
        blocks = blocks.flatten(2)
        if takes_turns:
            scales, blocks = (_gates_first(each) for each in (scales, blocks))
        return Mxfp4Matrix(blocks.contiguous(), scales.contiguous())


def parse(fields: Fields) -> QuantizationConfig:
    """Read a quantization_config of quant_method mxfp4."""
    where = f"{fields.where}: modules_to_not_convert"
    names = LayerNames.parse(fields.get("modules_to_not_convert"), where=where)
    ignored = LayerNames(tuple(_as_pattern(name) for name in names.patterns))
    rules = [Rule(LayerNames((r"re:.*\.experts(\.|$)",)), Mxfp4())]
    if names.patterns:
        rules.append(Rule(LayerNames(has_all=True), Float4("mxfp4")))
    return QuantizationConfig("mxfp4", tuple(rules), ignored)


def _gates_first(values: torch.Tensor) -> torch.Tensor:
    """Reorder outputs: [E, 2 * I, …], even ones first."""
    return values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _as_pattern(name: str) -> str:
    """Return the LayerNames pattern of a name in which a * stands for one component."""
    if name.startswith("re:") or "*" not in name:
        return name
    return "re:" + r"[^.]+".join(map(re.escape, name.split("*"))) + r"(\.|$)"
