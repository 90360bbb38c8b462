"""Unquantized: the LinearMethod of weights in the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.linear.ops import DenseLinear
from models.quantization.linear_method import LinearPart
from models.quantization.shards import read_dense
from models.weights.weights import Weights


class Unquantized:
    """LinearMethod: one dense [out, in] matrix."""

    def __init__(self) -> None:
        self._linear = DenseLinear()

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> dict[str, torch.Tensor]:
        """Read each `<name>.weight`; see LinearMethod.load."""
        shards = [read_dense(w, part) for part in parts]
        return {"weight": shards[0] if len(shards) == 1 else torch.cat(shards)}

    def apply(self, params: dict[str, torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply."""
        return self._linear(x, params["weight"], bias)
