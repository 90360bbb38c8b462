"""LoraLinear: any LinearMethod with the adapters' share of its product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora.reference import LoraWeights
from models.lora.stack import AdapterStack
from models.quantization.linear_method import LinearMethod, LinearParams, LinearPart
from models.weights.weights import Weights


@dataclass(frozen=True)
class LoraParams:
    """The layer's own params, and the adapters' matrices."""

    base: LinearParams
    adapters: LoraWeights | None  # None: no adapter has a share in this layer


class LoraLinear:
    """LinearMethod: what the method within makes of x, plus what each token's adapter does."""

    def __init__(self, method: LinearMethod, adapters: AdapterStack) -> None:
        self._method = method
        self._adapters = adapters
        self._tokens = adapters.tokens

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> LoraParams:
        """See LinearMethod.load."""
        base = None if self._tokens is None else self._method.load(w, parts)
        return LoraParams(base, self._adapters.load(w, parts))

    def apply(self, params: LoraParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply. x has all tokens of the step, in their order."""
        out = self._method.apply(params.base, x, bias)
        if params.adapters is not None and self._tokens is not None:
            self._tokens.add(out, x, params.adapters)
        return out


def with_adapters(method: LinearMethod, w: Weights) -> LinearMethod:
    """The method itself where nothing is to be added to a layer's weights."""
    return method if w.adapters is None else LoraLinear(method, w.adapters)
