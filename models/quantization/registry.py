"""From a model's QuantizationConfig to the LinearMethod of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.config import ModelConfig
from models.quantization.base import LinearMethod, LinearParams, LinearPart
from models.quantization.config import QuantizationConfig, Scheme
from models.quantization.matrices import check_share
from models.quantization.unquantized import Unquantized
from models.weights import Weights


def make_linear_method(config: ModelConfig) -> LinearMethod:
    """The method of all linear layers of a model; which scheme a layer has is decided when it is loaded."""
    return Unquantized() if config.quantization is None else PerLayer(config.quantization)


@dataclass(frozen=True)
class RoutedParams:
    """A layer, cut along its outputs where its parts have different methods."""

    methods: tuple[LinearMethod, ...]
    params: tuple[LinearParams, ...]
    sizes: tuple[int, ...]  # outputs of each on this rank


class PerLayer:
    """LinearMethod: for each layer that of its scheme, by its name in the checkpoint."""

    def __init__(self, config: QuantizationConfig) -> None:
        self._config = config
        self._methods: dict[Scheme | None, LinearMethod] = {None: Unquantized()}

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> RoutedParams:
        """Neighbouring parts of one scheme are loaded as one matrix; see LinearMethod.load."""
        groups: list[tuple[Scheme | None, list[LinearPart]]] = []
        for part in parts:
            name = w.projection(part.name, part.out_features).name
            scheme = self._config.scheme_of(name)
            if scheme is not None:
                whole = part.out_features if part.dim == 0 else part.in_features
                check_share(scheme, name, "outputs" if part.dim == 0 else "inputs", whole=whole, num_shares=part.size)
            if not groups or groups[-1][0] != scheme:
                groups.append((scheme, []))
            groups[-1][1].append(part)
        methods = tuple(self._method_of(scheme) for scheme, _ in groups)
        return RoutedParams(
            methods=methods,
            params=tuple(method.load(w, group) for method, (_, group) in zip(methods, groups, strict=True)),
            sizes=tuple(sum(part.outputs for part in group) for _, group in groups),
        )

    def apply(self, params: RoutedParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        if len(params.methods) == 1:
            return params.methods[0].apply(params.params[0], x, bias)
        biases: Sequence[Any] = (None,) * len(params.sizes) if bias is None else bias.split(params.sizes)
        outputs = map(lambda method, own, part: method.apply(own, x, part), params.methods, params.params, biases)
        return torch.cat(tuple(outputs), dim=-1)

    def _method_of(self, scheme: Scheme | None) -> LinearMethod:
        if scheme is None or scheme in self._methods:
            return self._methods[scheme]
        self._methods[scheme] = scheme.make_method()
        return self._methods[scheme]
