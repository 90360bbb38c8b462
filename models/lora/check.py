"""Whether adapters fit a model, told from shapes alone: before minutes go into reading its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.config.model_config import ModelConfig
from models.lora.adapter import Adapter
from models.lora.stack import AdapterStack
from models.parallel import TensorParallel
from models.registry import build
from models.weights.weights import Weights


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

    def finish(self, *, has_tied_embeddings: bool, unserved: tuple[str, ...] = ()) -> None:
        """Nothing is open, and nothing can be left over."""
