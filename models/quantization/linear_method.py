"""The quantisation seam: a LinearMethod owns how a linear layer's weights are stored and multiplied.

Layers say which checkpoint matrices they are made of and which share of each this rank has; they never touch storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from models.weights.weights import Weights

# What a method keeps of a layer, most often its own tensors by its own names; opaque to layers
LinearParams = Any


@dataclass(frozen=True)
class LinearPart:
    """This rank's share of one checkpoint matrix: part `rank` of `size` along its outputs (dim 0) or inputs (dim 1)."""

    name: str  # of the projection below the layer's Weights, e.g. "q_proj"
    out_features: int  # of the whole matrix
    in_features: int
    dim: int
    rank: int
    size: int

    @property
    def outputs(self) -> int:
        """Outputs of this rank."""
        return self.out_features // self.size if self.dim == 0 else self.out_features

    @property
    def inputs(self) -> int:
        """Inputs of this rank."""
        return self.in_features // self.size if self.dim == 1 else self.in_features


class LinearMethod(Protocol):
    """One scheme. Stateless: what it loads, it is given back."""

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> LinearParams:
        """Read the parts and merge them, in order, along their outputs. Raises ModelError."""
        ...

    def apply(self, params: LinearParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias. x: [T, in]; bias: [out]; returns [T, out], of x's dtype."""
        ...
