"""SplitReader: a projection that a checkpoint stores merged, read as the projections it was merged of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from models.weights.weights import TensorReader


class SplitReader:
    """TensorReader: `<prefix><part>.<tensor>` is a band of `<prefix><merged>.<tensor>`; all else is as it was.

    The bands lie along the dimension that a read slices: that of the outputs, in proportion to their number.
    """

    def __init__(self, reader: TensorReader, prefix: str, merged: str, sizes: Mapping[str, int]) -> None:
        self.device = reader.device
        self.dtype = reader.dtype
        self.is_random = reader.is_random
        self._reader = reader
        self._merged = f"{prefix}{merged}."
        self._num_outputs = sum(sizes.values())
        self._bands: dict[str, tuple[int, int]] = {}  # prefix of a part → its first output, and how many
        start = 0
        for part, size in sizes.items():
            self._bands[f"{prefix}{part}."] = (start, size)
            start += size

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
        """Read [start, stop) along dim; see TensorReader.read."""
        head, dot, tensor = name.rpartition(".")
        band = self._bands.get(head + dot)
        if band is None:
            return self._reader.read(name, shape, dim=dim, start=start, stop=stop, stored=stored)
        first, size = band
        whole = (*shape[:dim], shape[dim] * self._num_outputs // size, *shape[dim + 1 :])
        offset = shape[dim] * first // size
        return self._reader.read(
            self._merged + tensor, whole, dim=dim, start=offset + start, stop=offset + stop, stored=stored
        )

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """See TensorReader.shape_of."""
        return self._reader.shape_of(name)

    def projection(self, name: str) -> tuple[str, int, int | None]:
        """The merged matrix for its parts; see TensorReader.projection."""
        band = self._bands.get(f"{name}.")
        if band is None:
            return self._reader.projection(name)
        return self._merged.removesuffix("."), band[0], self._num_outputs

    def optional(self, name: str) -> torch.Tensor | None:
        """See TensorReader.optional; under its own name alone."""
        return self._reader.optional(name)

    def finish(self, *, has_tied_embeddings: bool, unserved: tuple[str, ...] = ()) -> None:
        """See TensorReader.finish."""
        self._reader.finish(has_tied_embeddings=has_tied_embeddings, unserved=unserved)
