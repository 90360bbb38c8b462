"""LoRA in linear layers: LoraLinear computes them, AdapterStack loads the matrices, check_adapters validates shapes.

LoraLinear wraps any LinearMethod and adds each token's adapter output to its product. AdapterStack holds all adapters
of one build of the model; the linear layers pull their matrices from it.

Life: __init__ → load(), once per linear layer → finish(). Each layer stores the matrices of all adapters in two tensors
at fixed addresses, so that a step may mix adapters and a CUDA graph may capture it. Adapter i of the list has number
i + 1; number 0 means no adapter.

check_adapters compares adapters with a model by shapes alone, before its weights are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from kernels.linear.rounding import RoundedRows, Rounding
from kernels.lora.reference import MAX_PARTS, LoraWeights
from kernels.ops import LoraTokens
from models.build import build
from models.config.model_config import ModelConfig
from models.lora.adapter import Adapter, LowRank
from models.parallel import TensorParallel
from models.quantization.linear_method import LinearMethod, LinearParams, LinearPart, TakesRoundedRows, rounding_of
from models.weights.weights import Projection, Weights

_LEAST_RANK = 16  # smallest operand size of the matrix units


class AdapterStack:
    """The adapters of one build. tokens: each token's adapter number; None: layers load shapes only, no computation.

    is_partial: the model has fewer layers than the adapters were made for.
    """

    def __init__(self, adapters: Sequence[Adapter], tokens: LoraTokens | None, *, is_partial: bool = False) -> None:
        self.tokens = tokens
        self.num_bytes = 0  # loaded so far
        self._adapters = adapters
        self._is_partial = is_partial
        self._read: list[set[str]] = [set() for _ in adapters]  # tensors read, per adapter

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> LoraWeights | None:
        """Load the adapters' matrices for these parts, None if no adapter changes them. Raises ModelError.

        Inputs and outputs are split over ranks like the parts, so that one all-reduce sums both.
        """
        modules = [w.projection(part.name, part.out_features) for part in parts]
        ranks = [adapter.rank_of(module.name) for adapter in self._adapters for module in modules]
        if not any(ranks):
            return None
        rank = max(_LEAST_RANK, 1 << (max(ranks) - 1).bit_length())
        sizes = tuple(part.outputs for part in parts)
        # Too many parts: the matrices of all modules side by side are one of a larger rank, with zeros elsewhere in b
        is_joined = len(parts) > MAX_PARTS
        names = list(dict.fromkeys(module.name for module in modules)) if is_joined else []
        num_ranks = (1 << (len(names) - 1).bit_length()) * rank if is_joined else rank
        shape_a = (len(self._adapters), 1 if is_joined else len(parts), num_ranks, parts[0].inputs)
        a = torch.zeros(shape_a, dtype=w.dtype, device=w.device)
        b = torch.zeros(len(self._adapters), sum(sizes), num_ranks, dtype=w.dtype, device=w.device)
        self.num_bytes += a.nbytes + b.nbytes
        for index, adapter in enumerate(self._adapters):
            for place, (part, module) in enumerate(zip(parts, modules, strict=True)):
                own_rank = adapter.rank_of(module.name)
                if own_rank:
                    self._read[index].update(adapter.names_of(module.name))
                    share = _share_of(adapter, part, module)
                    first = names.index(module.name) * rank if is_joined else 0
                    a[index, 0 if is_joined else place, first : first + own_rank] = share.a
                    b[index].split(sizes)[place][:, first : first + own_rank] = share.b
        return LoraWeights(a, b, (sum(sizes),) if is_joined else sizes)

    def finish(self) -> None:
        """Check after the build that all tensors were read. Raises ModelError naming unread tensors of an adapter."""
        if not self._is_partial:
            for adapter, read in zip(self._adapters, self._read, strict=True):
                adapter.refuse_unread(read)


def _share_of(adapter: Adapter, part: LinearPart, module: Projection) -> LowRank:
    """Return this rank's share of an adapter's update of a part. module: the matrix that is, or contains, the part."""
    whole = adapter.read(module.name, in_features=part.in_features, out_features=module.num_outputs)
    first_input = part.rank * part.inputs if part.dim == 1 else 0
    first_output = module.first_output + (part.rank * part.outputs if part.dim == 0 else 0)
    return LowRank(whole.a.narrow(1, first_input, part.inputs), whole.b.narrow(0, first_output, part.outputs))


@dataclass(frozen=True)
class LoraParams:
    """The wrapped method's params, and the adapters' matrices."""

    base: LinearParams
    adapters: LoraWeights | None  # None: no adapter changes this layer


class LoraLinear:
    """LinearMethod: the wrapped method's product plus the output of each token's adapter."""

    def __init__(self, method: LinearMethod, adapters: AdapterStack) -> None:
        self._method = method
        self._adapters = adapters
        self._tokens = adapters.tokens

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> LoraParams:
        """See LinearMethod.load."""
        base = None if self._tokens is None else self._method.load(w, parts)
        return LoraParams(base, self._adapters.load(w, parts))

    def apply(self, params: LoraParams, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See LinearMethod.apply. x holds all tokens of the step, in step order."""
        out = self._method.apply(params.base, x, bias)
        if params.adapters is not None and self._tokens is not None:
            self._tokens.add(out, x, params.adapters)
        return out

    def rounding(self, params: LoraParams) -> Rounding | None:
        """See TakesRoundedRows.rounding: adapters multiply the input as it is."""
        has_base = params.adapters is None and self._tokens is not None
        return rounding_of(self._method, params.base) if has_base else None

    def apply_rounded(self, params: LoraParams, x: RoundedRows, bias: torch.Tensor | None) -> torch.Tensor:
        """See TakesRoundedRows.apply_rounded."""
        return cast("TakesRoundedRows", self._method).apply_rounded(params.base, x, bias)


def with_adapters(method: LinearMethod, w: Weights) -> LinearMethod:
    """Wrap the method in LoraLinear, or return it unchanged if no adapters are loaded."""
    if w.adapters is None:
        return method
    return LoraLinear(method, cast("AdapterStack", w.adapters))  # Weights declares its companion by finish() alone


def check_adapters(adapters: Sequence[Adapter], config: ModelConfig, *, dtype: torch.dtype, tp: TensorParallel) -> int:
    """Return the adapters' bytes on each rank's device. Raises ModelError if one does not fit the model."""
    stack = AdapterStack(adapters, None)
    build(config, Weights.dummy(device=torch.device("meta"), dtype=dtype, adapters=stack), tp)
    return stack.num_bytes
