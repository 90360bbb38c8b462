"""QuantizationConfig: the storage schemes of a model's linear layers. Part of ModelConfig; made by schemes.py.

A Scheme is the frozen settings of one storage format. Each has its own file in this folder, which also makes its
LinearMethod, or is one. The layer's full name in the checkpoint decides its scheme.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from models.errors import ModelError
from models.quantization.linear_method import LinearMethod
from models.quantization.shards import StoredPart
from models.weights.headers import ExpectedTensor


class Scheme(Protocol):
    """One way to store and multiply matrices: a frozen dataclass, whose repr identifies it."""

    @property
    def output_multiple(self) -> int:
        """The number that each rank's outputs must be a multiple of; whole matrices need not be."""
        ...

    @property
    def input_multiple(self) -> int:
        """The same for each rank's inputs."""
        ...

    def describe(self) -> str:
        """Return a short text for logs and errors: "fp8 (e4m3, blocks of 128 × 128)"."""
        ...

    def matrix_bytes(self, out_features: int, in_features: int, *, itemsize: int) -> int:
        """Return the bytes of a matrix and its scales on the device. itemsize: bytes of the model's dtype."""
        ...

    def expected(self, part: StoredPart) -> list[ExpectedTensor]:
        """Return the tensors of a stored matrix that a layer or an expert reads. Raises ModelError for a bad split."""
        ...

    def make_method(self) -> LinearMethod:
        """Return the LinearMethod of layers with this scheme: itself, unless the method owns scratch."""
        ...


@dataclass(frozen=True)
class LayerNames:
    """A set of layers, given by patterns of their full names: `model.layers.0.mlp.gate_proj`.

    `re:…` is a regular expression matched at the name's start; other patterns are whole components: `mlp`, `layers.0`.
    """

    patterns: tuple[str, ...] = ()
    has_all: bool = False  # every linear layer

    def __contains__(self, name: str) -> bool:
        return self.has_all or self.entry_of(name) is not None

    def entry_of(self, name: str) -> str | None:
        """Return a pattern that selects a layer, None if none does."""
        for expression in self._expressions:
            if expression.match(name):
                return f"re:{expression.pattern}"
        if not self._components:
            return None
        parts = name.split(".")
        runs = (
            ".".join(parts[i : i + size]) for i in range(len(parts)) for size in self._sizes if i + size <= len(parts)
        )
        return next((run for run in runs if run in self._components), None)

    @functools.cached_property
    def tells_experts_apart(self) -> bool:
        """False if no pattern can select one expert of a layer and not another."""
        return bool(self._expressions) or any(
            pattern.split(".")[0].isdigit() or re.search(r"(^|\.)experts\.\d", pattern) for pattern in self._components
        )

    @functools.cached_property
    def _expressions(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern[3:]) for pattern in self.patterns if pattern.startswith("re:"))

    @functools.cached_property
    def _components(self) -> frozenset[str]:
        return frozenset(pattern for pattern in self.patterns if not pattern.startswith("re:"))

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """How many components the patterns have: a name is cut in runs of these alone, of millions of names."""
        return sorted({pattern.count(".") + 1 for pattern in self._components})

    @classmethod
    def parse(cls, value: object, *, where: str, everything: tuple[str, ...] = ()) -> LayerNames:
        """Read a list of patterns; null means none. everything: patterns that select every linear layer."""
        patterns = [] if value is None else value
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ModelError(f"{where} must be a list of layer names, found {value!r}")
        for pattern in patterns:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ModelError(f"{where}: {pattern!r} is not a regular expression: {error}") from error
        return cls(
            tuple(pattern for pattern in patterns if pattern not in everything), bool({*patterns} & {*everything})
        )


@dataclass(frozen=True)
class Rule:
    """The scheme of a set of layers."""

    layers: LayerNames
    scheme: Scheme


@dataclass(frozen=True)
class QuantizationConfig:
    """Rules in order: the first that contains a layer decides. Ignored and unmatched layers are not quantised."""

    name: str  # value of the flag --quantization: "fp8", "bitsandbytes-nf4", "awq"
    rules: tuple[Rule, ...]
    ignored: LayerNames = LayerNames()
    is_on_load: bool = False  # the checkpoint is not quantised; layers are quantised while they are read
    rounds_head: bool = False  # the LM head is multiplied as 8-bit integers; the embedding keeps its numbers

    @classmethod
    def of_all(
        cls, name: str, scheme: Scheme, *, ignored: LayerNames = LayerNames(), is_on_load: bool = False
    ) -> QuantizationConfig:
        """Make a config with one scheme for every linear layer that is not ignored."""
        return cls(name, (Rule(LayerNames(has_all=True), scheme),), ignored, is_on_load)

    def scheme_of(self, layer: str) -> Scheme | None:
        """Return a layer's scheme by its full name in the checkpoint; None: it is not quantised."""
        if layer in self.ignored:
            return None
        return next((rule.scheme for rule in self.rules if layer in rule.layers), None)

    def entry_of(self, layer: str) -> str | None:
        """Return the pattern that decides a layer's scheme; None: no pattern selects it, or every layer is selected."""
        if layer in self.ignored:
            return self.ignored.entry_of(layer)
        return next((rule.layers.entry_of(layer) for rule in self.rules if layer in rule.layers), None)

    @property
    def tells_experts_apart(self) -> bool:
        """False if all experts of a layer have one scheme."""
        return self.ignored.tells_experts_apart or any(rule.layers.tells_experts_apart for rule in self.rules)

    def describe(self) -> str:
        """Return a short text for logs and errors."""
        schemes = " and ".join(dict.fromkeys(rule.scheme.describe() for rule in self.rules))
        return f"{schemes}, quantized on load" if self.is_on_load else schemes


@contextmanager
def naming_scheme(quantization: QuantizationConfig | None, matrix: str, *, layer: str) -> Iterator[None]:
    """Add a layer's scheme to each ModelError of reading it, and the matrix's name where the error names no tensor.

    matrix: full name, which decides the scheme. layer: the part of the full name that all its matrices share.
    """
    try:
        yield
    except ModelError as error:
        scheme = None if quantization is None else quantization.scheme_of(matrix)
        if quantization is None or scheme is None:
            raise
        text = str(error) if (layer or matrix) in str(error) else f"{matrix}: {error}"
        if scheme.describe() not in text:
            way = "quantized on load" if quantization.is_on_load else "quantized"
            text = f"{text}; the layer is {way} as {scheme.describe()}"
        raise ModelError(text) from error


def check_blocks(scheme: Scheme, name: str, num_inputs: int, block: int) -> None:
    """Raise ModelError unless the inputs of matrix `name` are whole blocks of the scheme."""
    if num_inputs % block != 0:
        raise ModelError(
            f"{name}: {num_inputs} inputs are no multiple of {block}, the inputs that share a scale in"
            f" {scheme.describe()}"
        )


def check_share(
    scheme: Scheme,
    name: str,
    shared: Literal["outputs", "inputs"],
    *,
    whole: int,
    num_shares: int,
    remedy: str = "use fewer ranks",
) -> None:
    """Raise ModelError unless a share of a matrix's outputs or inputs ends at a block boundary of the scheme.

    name: the matrix. whole: its number of outputs or inputs; num_shares divides it. remedy: ends the error's sentence.
    """
    if num_shares == 1:
        return
    multiple = scheme.output_multiple if shared == "outputs" else scheme.input_multiple
    share = whole // num_shares
    if share % multiple != 0:
        raise ModelError(
            f"{name}: {num_shares} ranks have {share} {shared} each, but {scheme.describe()}"
            f" is split only at multiples of {multiple}: {remedy}"
        )
