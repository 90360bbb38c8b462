"""LinearMethod: stores and multiplies the weights of linear layers. The interface between layers and quantisation.

A layer names its checkpoint matrices and this rank's share of each (LinearPart); it never accesses the stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from kernels.linear.late_norm import GateKind, LateNorm
from kernels.linear.rounding import RoundedRows, Rounding
from models.weights.weights import Weights

# A method's data of one layer, usually tensors under the method's own names; opaque to layers
LinearParams = Any
# expert → this rank's dense gate and up, or its down, [outputs, inputs] each; experts are read in order, once
ReadExpert = Callable[[int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class LinearPart:
    """This rank's share of one checkpoint matrix: part `rank` of `size` along its outputs (dim 0) or inputs (dim 1)."""

    name: str  # the projection's name below the layer's Weights, e.g. "q_proj"
    out_features: int  # of the whole matrix
    in_features: int
    dim: int
    rank: int
    size: int

    @property
    def outputs(self) -> int:
        """Number of this rank's outputs."""
        return self.out_features // self.size if self.dim == 0 else self.out_features

    @property
    def inputs(self) -> int:
        """Number of this rank's inputs."""
        return self.in_features // self.size if self.dim == 1 else self.in_features


class LinearMethod(Protocol):
    """One scheme's load and multiply. Stateless: apply() gets the params that load() returned."""

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> LinearParams:
        """Read the parts and merge them, in order, along their outputs. Raises ModelError."""
        ...

    def apply(self, params: LinearParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias. x: [T, in]; bias: [out]; returns [T, out], of x's dtype."""
        ...


@runtime_checkable
class TakesRoundedRows(Protocol):
    """A LinearMethod that rounds its input, which the op before it may do instead."""

    def rounding(self, params: LinearParams) -> Rounding | None:
        """Return how these params' input is rounded; None: it is not, or not by other ops."""
        ...

    def apply_rounded(self, params: LinearParams, x: RoundedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Do what apply() does with an input that is rounded as rounding() says."""
        ...


@runtime_checkable
class TakesGate(Protocol):
    """A LinearMethod that may apply an MLP's gated activation within the product of its gates and ups."""

    def gates(self, params: LinearParams, x: torch.Tensor) -> bool:
        """Return True if apply_gated() is faster for these rows; decided from host-side facts."""
        ...

    def apply_gated(self, params: LinearParams, x: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
        """Equal silu_and_mul, or gelu_tanh_and_mul, of apply() without bias: [T, out / 2]. Requires gates()."""
        ...


@runtime_checkable
class TakesNorm(Protocol):
    """A LinearMethod that may compute the addition to the residual stream and the norm before its product."""

    def takes_norm(self, params: LinearParams, x: torch.Tensor) -> bool:
        """Return True if apply_normed() is faster for these rows; decided from host-side facts."""
        ...

    def apply_normed(
        self,
        params: LinearParams,
        late: LateNorm,
        bias: torch.Tensor | None,
        *,
        gate: GateKind = "",
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Equal kernels.linear.late_norm.normed_linear. Requires takes_norm(params, late.x)."""
        ...


def rounding_of(method: LinearMethod, params: LinearParams) -> Rounding | None:
    """Return how a method's input may be rounded before it; None: not at all."""
    return method.rounding(params) if isinstance(method, TakesRoundedRows) else None
