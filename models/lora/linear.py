"""LoraLinear: any LinearMethod with the adapters' share of its product.

AdapterStack: all adapters side by side, as the linear layers of one build of the model pull them.

Life: __init__ → load(), once per linear layer → finish(). A layer's matrices of all adapters are two tensors at fixed
addresses, so a step may mix adapters, and a CUDA graph may hold it. Adapter i of the list is number i + 1.

Whether adapters fit a model, told from shapes alone: before minutes go into reading its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from kernels.lora.reference import LoraWeights
from kernels.ops import LoraTokens
from models.build import build
from models.config.model_config import ModelConfig
from models.lora.adapter import Adapter, LowRank
from models.parallel import TensorParallel
from models.quantization.linear_method import LinearMethod, LinearParams, LinearPart
from models.weights.weights import Projection, Weights

_LEAST_RANK = 16  # what matrix units take at once


class AdapterStack:
    """tokens: whose a step's tokens are; None: the layers are asked for their shapes only, and compute nothing.

    is_partial: the model has fewer layers than the adapters were made for.
    """

    def __init__(self, adapters: Sequence[Adapter], tokens: LoraTokens | None, *, is_partial: bool = False) -> None:
        self.tokens = tokens
        self.num_bytes = 0  # of what was loaded until now
        self._adapters = adapters
        self._is_partial = is_partial
        self._read: list[set[str]] = [set() for _ in adapters]  # tensors of each

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> LoraWeights | None:
        """Return what the adapters add to the product of these parts; None: nothing. Raises ModelError.

        Inputs and outputs are split over ranks as the parts': the shares of all ranks add up where theirs do.
        """
        modules = [w.projection(part.name, part.out_features) for part in parts]
        ranks = [adapter.rank_of(module.name) for adapter in self._adapters for module in modules]
        if not any(ranks):
            return None
        rank = max(_LEAST_RANK, 1 << (max(ranks) - 1).bit_length())
        sizes = tuple(part.outputs for part in parts)
        shape_a = (len(self._adapters), len(parts), rank, parts[0].inputs)
        a = torch.zeros(shape_a, dtype=w.dtype, device=w.device)
        b = torch.zeros(len(self._adapters), sum(sizes), rank, dtype=w.dtype, device=w.device)
        self.num_bytes += a.nbytes + b.nbytes
        for index, adapter in enumerate(self._adapters):
            for place, (part, module) in enumerate(zip(parts, modules, strict=True)):
                own_rank = adapter.rank_of(module.name)
                if own_rank:
                    self._read[index].update(adapter.names_of(module.name))
                    share = _share_of(adapter, part, module)
                    a[index, place, :own_rank] = share.a
                    b[index].split(sizes)[place][:, :own_rank] = share.b
        return LoraWeights(a, b, sizes)

    def finish(self) -> None:
        """Say that the model is built. Raises ModelError naming tensors of an adapter that no layer asked for."""
        if not self._is_partial:
            for adapter, read in zip(self._adapters, self._read, strict=True):
                adapter.refuse_unread(read)


def _share_of(adapter: Adapter, part: LinearPart, module: Projection) -> LowRank:
    """Return this rank's share of what an adapter adds to a part: the module is the part, or holds it."""
    whole = adapter.read(module.name, in_features=part.in_features, out_features=module.num_outputs)
    first_input = part.rank * part.inputs if part.dim == 1 else 0
    first_output = module.first_output + (part.rank * part.outputs if part.dim == 0 else 0)
    return LowRank(whole.a.narrow(1, first_input, part.inputs), whole.b.narrow(0, first_output, part.outputs))


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
    if w.adapters is None:
        return method
    return LoraLinear(method, cast("AdapterStack", w.adapters))  # Weights knows its companion by finish() alone


def check_adapters(adapters: Sequence[Adapter], config: ModelConfig, *, dtype: torch.dtype, tp: TensorParallel) -> int:
    """Return the bytes that the adapters take on each rank's device. Raises ModelError if one is not of this model."""
    stack = AdapterStack(adapters, None)
    build(config, Weights(ShapeReader(dtype), adapters=stack), tp)
    return stack.num_bytes


class ShapeReader:
    """TensorReader: whatever is asked for, without values."""

    is_random = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("meta")
        self.dtype = dtype

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int,
        start: int,
        stop: int,
        stored: tuple[torch.dtype, ...] = (),
    ) -> torch.Tensor:
        """See TensorReader.read."""
        dtype = stored[0] if stored else self.dtype
        part = (*shape[:dim], stop - start, *shape[dim + 1 :]) if shape else ()
        return torch.empty(part, device=self.device, dtype=dtype)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Nothing is stored."""
        return None

    def projection(self, name: str) -> tuple[str, int, int | None]:
        """See TensorReader.projection."""
        return name, 0, None

    def optional(self, name: str) -> torch.Tensor | None:
        """Nothing optional is there."""
        return None

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Nothing is open, and nothing can be left over."""
