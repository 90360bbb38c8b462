"""AdapterStack: all adapters side by side, as the linear layers of one build of the model pull them.

Life: __init__ → load(), once per linear layer → finish(). A layer's matrices of all adapters are two tensors at fixed
addresses, so a step may mix adapters, and a CUDA graph may hold it. Adapter i of the list is number i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kernels.lora.reference import LoraWeights
from models.lora.adapter import Adapter, LowRank

if TYPE_CHECKING:
    from kernels.ops import LoraTokens
    from models.quantization.linear_method import LinearPart
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
