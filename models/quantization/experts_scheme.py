"""Schemes that the routed experts of a layer may have, and the choice of a layer's by its names.

A checkpoint stores either each expert's matrices by themselves (EachExpert) or all experts' in one tensor (AllExperts).
A scheme of the one form is refused for a family whose checkpoints have the other. DenseExperts: 16 bits. Experts of any
family's 16-bit checkpoints may be quantised on load (QuantizesExperts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch

from kernels.moe.planes import takes_planes
from kernels.moe.storage import ExpertMatrix, Mxfp4Matrix
from models.errors import ModelError
from models.parallel import ExpertShare
from models.quantization.config import QuantizationConfig, Scheme, check_blocks
from models.quantization.integers import IntScheme
from models.quantization.linear_method import LinearPart, ReadExpert
from models.quantization.shards import StoredPart, expected_dense, read_dense
from models.weights.weights import Weights

# The first part of an expert → all, in the spellings of published checkpoints
_PARTS = {
    "gate_proj": ("gate_proj", "up_proj", "down_proj"),
    "w1": ("w1", "w3", "w2"),
    "up_proj": ("up_proj", "down_proj"),
}
# How a family's checkpoints store quantised experts; "none": in no form that is read
ExpertsForm = Literal["each", "all", "none"]


@runtime_checkable
class EachExpert(Protocol):
    """Reads experts from tensors of their own: `experts.N.<part>.weight` and its scales."""

    def load_each(self, w: Weights, experts: range, parts: Sequence[LinearPart]) -> ExpertMatrix:
        """Read the parts of these experts, below w / `experts.N`, merged in order along their outputs.

        All parts are of one size. Raises ModelError.
        """
        ...


@runtime_checkable
class PackedExperts(EachExpert, Protocol):
    """EachExpert of a scheme of linear layers too, whose experts are stored otherwise or have limits of their own."""

    def experts_limit(self) -> str | None:
        """Return why experts may not have this scheme's settings; None: they may."""
        ...

    def expert_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of one expert's matrix and its scales on the device."""
        ...


@runtime_checkable
class ArrangedExperts(Protocol):
    """A scheme whose experts some GPUs take as PlanesMatrix (kernels/moe/planes.py)."""

    def planes_bytes(self, out_features: int, in_features: int) -> int | None:
        """Return the bytes of one expert's matrix and its scales so arranged; None: these settings are not."""
        ...


@runtime_checkable
class AllExperts(Protocol):
    """Reads a matrix of all experts from one tensor."""

    def load_all(self, w: Weights, share: ExpertShare, part: LinearPart, *, takes_turns: bool) -> Mxfp4Matrix:
        """Read this rank's part of its experts. Raises ModelError.

        takes_turns: outputs are gate, up, gate, up … and become gates, then ups.
        """
        ...


@runtime_checkable
class QuantizesExperts(Protocol):
    """Quantises dense experts while they are read."""

    def quantize_each(self, experts: range, read: ReadExpert) -> ExpertMatrix:
        """Quantise these experts, one at a time, their parts merged in order along their outputs."""
        ...


@runtime_checkable
class HasExpertBlocks(Protocol):
    """A scheme whose experts are whole blocks of inputs."""

    @property
    def expert_block(self) -> int:
        """Return the inputs of a block."""
        ...


class DenseExperts:
    """EachExpert of weights in the model's dtype."""

    def load_each(self, w: Weights, experts: range, parts: Sequence[LinearPart]) -> torch.Tensor:
        """See EachExpert.load_each."""
        shape = (len(experts), sum(part.outputs for part in parts), parts[0].inputs)
        out = torch.empty(shape, dtype=w.dtype, device=w.device)
        for place, expert in enumerate(experts):
            rows = out[place].split([part.outputs for part in parts])
            for part, target in zip(parts, rows, strict=True):
                target.copy_(read_dense(w / f"experts.{expert}", part))
        return out


def expect_experts(w: Weights, experts: range, parts: Sequence[LinearPart], scheme: Scheme | None) -> None:
    """Check these experts' tensors by their headers, without reading them; scheme None: 16 bits. Raises ModelError."""
    assert w.headers is not None
    for part in parts:
        view = w / f"experts.{experts[0]}"
        first = StoredPart.locate(view, part)
        is_alone = first.name == view.full_name(part.name)  # not stored in a merged matrix
        tensors = expected_dense(first) if scheme is None else scheme.expected(first)  # of each: they are of one size
        for expert in experts:
            name = w.full_name(f"experts.{expert}.{part.name}")
            w.headers.expect(name if is_alone else StoredPart.locate(w / f"experts.{expert}", part).name, tensors)


def each_expert_scheme(quantization: QuantizationConfig | None, layers: Sequence[str]) -> EachExpert | None:
    """Return the scheme of experts whose matrices have these full names; None: 16 bits. Raises ModelError."""
    found = _common_scheme(quantization, layers)
    if found is not None and not isinstance(found, EachExpert):
        raise ModelError(f"{_refusal(quantization, layers[0])} of separate experts")
    limit = found.experts_limit() if isinstance(found, PackedExperts) else None
    if limit is not None:
        raise ModelError(f"{layers[0]} is quantized as {_describe(quantization, layers[0])}: {limit}")
    return found


def all_experts_scheme(quantization: QuantizationConfig | None, layers: Sequence[str]) -> AllExperts | None:
    """Return the scheme of tensors of all experts with these full names; None: 16 bits. Raises ModelError."""
    found = _common_scheme(quantization, layers)
    if found is None or isinstance(found, AllExperts):
        return found
    raise ModelError(f"{_refusal(quantization, layers[0])} of all experts in one tensor")


def on_load_scheme(quantization: QuantizationConfig | None, layers: Sequence[str]) -> QuantizesExperts | None:
    """Return what quantises experts whose matrices have these full names on load; None: they stay as they are."""
    if quantization is None or not quantization.is_on_load:
        return None
    found = _same_scheme(quantization, layers)
    return found if isinstance(found, QuantizesExperts) else None


def check_expert_blocks(scheme: Scheme, layer: str, num_inputs: int) -> None:
    """Raise ModelError, naming layer and scheme, unless an expert's matrix has whole blocks of inputs."""
    if isinstance(scheme, HasExpertBlocks):
        check_blocks(scheme, layer, num_inputs, scheme.expert_block)


def expert_matrices(
    quantization: QuantizationConfig | None, block: str, num_experts: int, parts: Sequence[str]
) -> list[str]:
    """Return full names of experts' matrices that have all the schemes of a layer. block: the layer's `experts`."""
    is_one = quantization is None or not quantization.tells_experts_apart
    return [f"{block}.{expert}.{part}" for expert in range(1 if is_one else num_experts) for part in parts]


def check_experts(quantization: QuantizationConfig | None, layer: str, form: ExpertsForm, *, num_experts: int) -> None:
    """Raise ModelError, naming layer and scheme, unless experts of this form may have the layer's scheme.

    layer: the first matrix of the first expert, or of all in one tensor.
    """
    if form == "each":
        block, _, part = layer.rpartition(".0.")
        each_expert_scheme(quantization, expert_matrices(quantization, block, num_experts, _PARTS.get(part, (part,))))
    elif form == "all":
        all_experts_scheme(quantization, [layer])
    elif _common_scheme(quantization, [layer]) is not None:
        raise ModelError(f"{_refusal(quantization, layer)} of this family's experts")


def _common_scheme(quantization: QuantizationConfig | None, layers: Sequence[str]) -> object | None:
    """Return the scheme that all layers have in the checkpoint."""
    return None if quantization is None or quantization.is_on_load else _same_scheme(quantization, layers)


def _same_scheme(quantization: QuantizationConfig, layers: Sequence[str]) -> Scheme | None:
    first, *others = [quantization.scheme_of(layer) for layer in layers]
    for layer, scheme in zip(layers[1:], others, strict=True):
        if scheme != first:
            kinds = ["not quantized" if each is None else each.describe() for each in (first, scheme)]
            entry = quantization.entry_of(layer) or quantization.entry_of(layers[0])
            by = "" if entry is None else f", by the entry {entry!r} of quantization_config"
            raise ModelError(
                f"{layers[0]} is {kinds[0]} and {layer} is {kinds[1]}{by}: all experts of a layer have one scheme"
            )
    return first


def expert_bytes(
    scheme: Scheme, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device | None
) -> int:
    """Return the bytes of one expert's matrix and its scales on the device; see Scheme.matrix_bytes.

    dtype: the model's. device: which may take PlanesMatrix, if both of a layer's matrices allow it; None: none does.
    """
    is_integer = isinstance(scheme, IntScheme)
    if (
        device is not None
        and isinstance(scheme, ArrangedExperts)
        and takes_planes(dtype, device, is_integer=is_integer)
    ):
        arranged = scheme.planes_bytes(out_features, in_features)
        if arranged is not None and scheme.planes_bytes(in_features, out_features) is not None:
            return arranged
    if isinstance(scheme, PackedExperts):
        return scheme.expert_bytes(out_features, in_features)
    return scheme.matrix_bytes(out_features, in_features, itemsize=dtype.itemsize)


def _refusal(quantization: QuantizationConfig | None, layer: str) -> str:
    return f"{layer} is quantized as {_describe(quantization, layer)}, which is not supported for matrices"


def _describe(quantization: QuantizationConfig | None, layer: str) -> str:
    assert quantization is not None
    scheme = quantization.scheme_of(layer)
    assert scheme is not None
    return scheme.describe()
