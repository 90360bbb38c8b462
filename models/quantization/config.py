"""QuantizationConfig: how the linear layers of a model are stored. Part of ModelConfig, made by quantization/parse.py.

A Scheme is the frozen settings of one way to store a matrix; each is a file beside this one, which makes its
LinearMethod, too. Which layer has which scheme is decided by the layer's full name in the checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

from models.errors import ModelError
from models.quantization.linear_method import LinearMethod


class Scheme(Protocol):
    """One way to store and multiply matrices: a frozen dataclass, whose repr tells it from every other."""

    @property
    def output_multiple(self) -> int:
        """What the outputs of a rank's share of a matrix are a multiple of; whole matrices need not be."""
        ...

    @property
    def input_multiple(self) -> int:
        """The same for inputs."""
        ...

    def describe(self) -> str:
        """Say it for people, in some words: "fp8 (e4m3, blocks of 128 × 128)"."""
        ...

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """Bytes that a matrix and its scales take on the device. itemsize: of the model's dtype."""
        ...

    def make_method(self) -> LinearMethod:
        """Return the LinearMethod of such layers."""
        ...


@dataclass(frozen=True)
class LayerNames:
    """A set of layers, by patterns of their full names: `model.layers.0.mlp.gate_proj`.

    `re:…`: a regular expression that a name begins with; else whole components of a name: `mlp`, `layers.0`.
    """

    patterns: tuple[str, ...] = ()
    has_all: bool = False  # every linear layer

    def __contains__(self, name: str) -> bool:
        return self.has_all or any(_matches(pattern, name) for pattern in self.patterns)

    @classmethod
    def parse(cls, value: object, *, where: str, everything: tuple[str, ...] = ()) -> LayerNames:
        """Read a list of patterns; null is none. everything: the patterns that mean every linear layer."""
        patterns = [] if value is None else value
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ModelError(f"{where} must be a list of layer names, found {value!r}")
        for pattern in patterns:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ModelError(f"{where}: {pattern!r} is no regular expression: {error}") from error
        return cls(
            tuple(pattern for pattern in patterns if pattern not in everything), bool({*patterns} & {*everything})
        )


@dataclass(frozen=True)
class Rule:
    """These layers have this scheme."""

    layers: LayerNames
    scheme: Scheme


@dataclass(frozen=True)
class QuantizationConfig:
    """The first rule that has a layer's name decides; layers of none, and those that are ignored, stay as they are."""

    name: str  # as the flag --quantization would say it: "fp8", "bitsandbytes-nf4", "awq"
    rules: tuple[Rule, ...]
    ignored: LayerNames = LayerNames()
    is_on_load: bool = False  # the checkpoint is not quantised; its layers are while they are read

    @classmethod
    def of_all(
        cls, name: str, scheme: Scheme, *, ignored: LayerNames = LayerNames(), is_on_load: bool = False
    ) -> QuantizationConfig:
        """One scheme for every linear layer that is not ignored."""
        return cls(name, (Rule(LayerNames(has_all=True), scheme),), ignored, is_on_load)

    def scheme_of(self, layer: str) -> Scheme | None:
        """The scheme of a layer by its full name in the checkpoint; None: it is not quantised."""
        if layer in self.ignored:
            return None
        return next((rule.scheme for rule in self.rules if layer in rule.layers), None)

    def describe(self) -> str:
        """Say it for people."""
        schemes = " and ".join(dict.fromkeys(rule.scheme.describe() for rule in self.rules))
        return f"{schemes}, quantized on load" if self.is_on_load else schemes


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."


def check_share(
    scheme: Scheme, name: str, shared: Literal["outputs", "inputs"], *, whole: int, num_shares: int
) -> None:
    """Raise ModelError unless a share of a matrix's outputs or inputs ends where the scheme's blocks do.

    name: of the matrix. whole: how many outputs or inputs it has; num_shares divides it.
    """
    if num_shares == 1:
        return
    multiple = scheme.output_multiple if shared == "outputs" else scheme.input_multiple
    share = whole // num_shares
    if share % multiple != 0:
        raise ModelError(
            f"{name}: {num_shares} ranks have {share} {shared} each, but {scheme.describe()}"
            f" is split only at multiples of {multiple}: use fewer ranks"
        )
