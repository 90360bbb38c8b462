"""AdapterStack: all adapters side by side, as the linear layers of one build of the model pull them.

Life: __init__ → load(), once per linear layer → finish(). A layer's matrices of all adapters are two tensors at fixed
addresses, so a step may mix adapters, and a CUDA graph may hold it. Adapter i of the list is number i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kernels.lora import LoraWeights
from models.lora.adapter import Adapter

if TYPE_CHECKING:
    from kernels.ops import LoraTokens
    from models.quantization.base import LinearPart
    from models.weights import Weights

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
        self._read: set[tuple[str, str]] = set()  # adapter, tensor

    def load(self, w: Weights, parts: Sequence[LinearPart]) -> LoraWeights | None:
        """Return what the adapters add to the product of these parts; None: nothing. Raises ModelError.

        Inputs and outputs are split over ranks as the parts': the shares of all ranks add up where theirs do.
        """
        modules = [w.projection(part.name, part.out_features) for part in parts]
        ranks = [adapter.rank_of(module.name) for adapter in self._adapters for module in modules]
        if not any(ranks):
            return None
        rank = max(_LEAST_RANK, 1 << (max(ranks) - 1).bit_length())
        sizes = tuple(part.out_features // _split(part, 0) for part in parts)
        shape_a = (len(self._adapters), len(parts), rank, parts[0].in_features // _split(parts[0], 1))
        a = torch.zeros(shape_a, dtype=w.dtype, device=w.device)
        b = torch.zeros(len(self._adapters), sum(sizes), rank, dtype=w.dtype, device=w.device)
        self.num_bytes += a.nbytes + b.nbytes
        for index, adapter in enumerate(self._adapters):
            outputs = b[index].split(sizes)
            for place, (part, module) in enumerate(zip(parts, modules, strict=True)):
                own_rank = adapter.rank_of(module.name)
                if own_rank == 0:
                    continue
                share = adapter.read(module.name, in_features=part.in_features, out_features=module.num_outputs)
                self._read.update((adapter.name, name) for name in adapter.names_of(module.name))
                band = share.b.narrow(0, module.first_output, part.out_features)
                a[index, place, :own_rank] = share.a.chunk(_split(part, 1), dim=1)[part.rank if part.dim == 1 else 0]
                outputs[place][:, :own_rank] = band.chunk(_split(part, 0))[part.rank if part.dim == 0 else 0]
        return LoraWeights(a, b, sizes)

    def finish(self) -> None:
        """Say that the model is built. Raises ModelError naming tensors of an adapter that no layer asked for."""
        if not self._is_partial:
            for adapter in self._adapters:
                adapter.refuse_unread(frozenset(name for owner, name in self._read if owner == adapter.name))


def _split(part: LinearPart, dim: int) -> int:
    """Into how many shares a part's matrix is cut along dim."""
    return part.size if part.dim == dim else 1
