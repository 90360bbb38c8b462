"""Schemes that the routed experts of a layer may have, and the choice of a layer's by its names.

A checkpoint stores either each expert's matrices by themselves (EachExpert) or all experts' in one tensor (AllExperts).
A scheme of the one form is refused for a family whose checkpoints have the other. DenseExperts: 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch

from kernels.moe.storage import ExpertMatrix, Mxfp4Matrix
from models.errors import ModelError
from models.quantization.config import QuantizationConfig
from models.quantization.linear_method import LinearPart
from models.quantization.shards import read_dense
from models.weights.weights import Weights

# How a family's checkpoints store quantised experts; "none": in no form that is read
ExpertsForm = Literal["each", "all", "none"]


@runtime_checkable
class EachExpert(Protocol):
    """Reads experts from tensors of their own: `experts.N.<part>.weight` and its scales."""

    def load_each(self, w: Weights, num_experts: int, parts: Sequence[LinearPart]) -> ExpertMatrix:
        """Read the parts of every expert, below w / `experts.N`, merged in order along their outputs.

        All parts are of one size. Raises ModelError.
        """
        ...


@runtime_checkable
class AllExperts(Protocol):
    """Reads a matrix of all experts from one tensor."""

    def load_all(self, w: Weights, num_experts: int, part: LinearPart, *, takes_turns: bool) -> Mxfp4Matrix:
        """Read this rank's part. takes_turns: outputs are gate, up, gate, up … and become gates, then ups.

        Raises ModelError.
        """
        ...


class DenseExperts:
    """EachExpert of weights in the model's dtype."""

    def load_each(self, w: Weights, num_experts: int, parts: Sequence[LinearPart]) -> torch.Tensor:
        """See EachExpert.load_each."""
        shape = (num_experts, sum(part.outputs for part in parts), parts[0].inputs)
        out = torch.empty(shape, dtype=w.dtype, device=w.device)
        for expert in range(num_experts):
            rows = out[expert].split([part.outputs for part in parts])
            for part, target in zip(parts, rows, strict=True):
                target.copy_(read_dense(w / f"experts.{expert}", part))
        return out


def each_expert_scheme(quantization: QuantizationConfig | None, layers: Sequence[str]) -> EachExpert | None:
    """Return the scheme of experts whose matrices have these full names; None: 16 bits. Raises ModelError."""
    found = _common_scheme(quantization, layers)
    if found is None or isinstance(found, EachExpert):
        return found
    raise ModelError(f"{_refusal(quantization, layers[0])} of separate experts")


def all_experts_scheme(quantization: QuantizationConfig | None, layers: Sequence[str]) -> AllExperts | None:
    """Return the scheme of tensors of all experts with these full names; None: 16 bits. Raises ModelError."""
    found = _common_scheme(quantization, layers)
    if found is None or isinstance(found, AllExperts):
        return found
    raise ModelError(f"{_refusal(quantization, layers[0])} of all experts in one tensor")


def check_experts(quantization: QuantizationConfig | None, layer: str, form: ExpertsForm) -> None:
    """Raise ModelError, naming layer and scheme, unless experts of this form may have the layer's scheme."""
    if form == "each":
        each_expert_scheme(quantization, [layer])
    elif form == "all":
        all_experts_scheme(quantization, [layer])
    elif _common_scheme(quantization, [layer]) is not None:
        raise ModelError(f"{_refusal(quantization, layer)} of this family's experts")


def _common_scheme(quantization: QuantizationConfig | None, layers: Sequence[str]) -> object | None:
    """Return the scheme that all layers have. Quantisation on load leaves experts as they are."""
    if quantization is None or quantization.is_on_load:
        return None
    first, *others = [quantization.scheme_of(layer) for layer in layers]
    for layer, scheme in zip(layers[1:], others, strict=True):
        if scheme != first:
            kinds = ["not quantized" if each is None else each.describe() for each in (first, scheme)]
            raise ModelError(
                f"{layers[0]} is {kinds[0]} and {layer} is {kinds[1]}: all experts of a layer have one scheme"
            )
    return first


def _refusal(quantization: QuantizationConfig | None, layer: str) -> str:
    assert quantization is not None
    scheme = quantization.scheme_of(layer)
    assert scheme is not None
    return f"{layer} is quantized as {scheme.describe()}, which is not supported for matrices"
