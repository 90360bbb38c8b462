"""Weights: a checkpoint's tensors, pulled by name while the model is built.

A layer asks for what it needs (`w / "layers.0" / "self_attn"`, then tensor or slice). Each read goes straight to the
device and dtype, and only this rank's slice is read from the file. After the build, finish() raises an error for every
tensor that no layer asked for: a partly read checkpoint is a wrong model. SplitReader presents a projection that a
checkpoint stores merged (such as qkv_proj) as its parts. The readers are in models/weights/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from models.weights.checkpoint import Progress, RandomReader, SafetensorsReader


class Companion(Protocol):
    """A second source of weights that the layers of one build read, such as LoRA adapters."""

    def finish(self) -> None:
        """Check after the build that all tensors were read. Raises ModelError naming unread tensors."""
        ...


class SplitReader:
    """TensorReader: `<prefix><part>.<tensor>` is a band of `<prefix><merged>.<tensor>`; other names pass unchanged.

    Bands lie along the dimension that a read slices, in proportion to the parts' numbers of outputs.
    """

    def __init__(self, reader: TensorReader, prefix: str, merged: str, sizes: Mapping[str, int]) -> None:
        self.device = reader.device
        self.dtype = reader.dtype
        self.is_random = reader.is_random
        self._reader = reader
        self._merged = f"{prefix}{merged}."
        self._num_outputs = sum(sizes.values())
        self._bands: dict[str, tuple[int, int]] = {}  # prefix of a part → its first output, and its number of outputs
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
        """Return the merged matrix for its parts; see TensorReader.projection."""
        band = self._bands.get(f"{name}.")
        if band is None:
            return self._reader.projection(name)
        return self._merged.removesuffix("."), band[0], self._num_outputs

    def optional(self, name: str) -> torch.Tensor | None:
        """See TensorReader.optional; names are not mapped."""
        return self._reader.optional(name)

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        """See TensorReader.finish."""
        self._reader.finish(has_tied_embeddings=has_tied_embeddings, ignored_prefixes=ignored_prefixes)


class TensorReader(Protocol):
    """A source of tensors by full name, on one device and in one dtype."""

    device: torch.device
    dtype: torch.dtype
    is_random: bool  # any requested tensor is made; nothing is stored

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
        """Return a new tensor: [start, stop) along dim of `name`, which must have `shape`. Raises ModelError.

        stored: the tensor must have one of these dtypes and keeps it; without it, the result has the model's dtype.
        Shape () is a scalar.
        """
        ...

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of tensor `name`, None if it is missing or tensors are random."""
        ...

    def projection(self, name: str) -> tuple[str, int, int | None]:
        """Return the matrix that holds projection `name`: its name, the projection's first output, its output count.

        An output count of None: the matrix is the projection alone.
        """
        ...

    def optional(self, name: str) -> torch.Tensor | None:
        """Read a small tensor of any shape in fp32 on the CPU; None if it is missing. Raises ModelError."""
        ...

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Close files. Raises ModelError for unread tensors, except those under ignored_prefixes."""
        ...


@dataclass(frozen=True)
class Projection:
    """A projection's place in a checkpoint: a matrix of its own, or a band of a larger matrix's outputs."""

    w: Weights  # the view that holds the matrix
    name: str  # full name without a tensor's: "model.layers.0.self_attn.q_proj"
    first_output: int
    num_outputs: int  # of the whole matrix


class Weights:
    """A view of a reader under a name prefix. Views are cheap: `w / "mlp"` makes another.

    adapters: LoRA adapters that the linear layers add to their products; None: no adapters.
    """

    def __init__(self, reader: TensorReader, prefix: str = "", *, adapters: Companion | None = None) -> None:
        self._reader = reader
        self._prefix = prefix
        self.adapters = adapters
        self.device = reader.device
        self.dtype = reader.dtype
        self.is_random = reader.is_random

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
        adapters: Companion | None = None,
    ) -> Weights:
        """Open model.safetensors, or the shards of model.safetensors.index.json. Raises ModelError.

        progress(bytes_done, bytes_total) is called after each first read of a tensor, and once by finish().
        """
        reader = SafetensorsReader(Path(folder), device=device, dtype=dtype, progress=progress)
        return cls(reader, adapters=adapters)

    @classmethod
    def dummy(
        cls, *, device: torch.device, dtype: torch.dtype, seed: int = 0, adapters: Companion | None = None
    ) -> Weights:
        """Make random weights on the device (--load-format dummy): the same tensors for every split over ranks."""
        return cls(RandomReader(device=device, dtype=dtype, seed=seed), adapters=adapters)

    def __truediv__(self, part: str) -> Weights:
        return Weights(self._reader, f"{self._prefix}{part}.", adapters=self.adapters)

    def split(self, merged: str, sizes: Mapping[str, int]) -> Weights:
        """Return a view that presents the checkpoint's projection `merged` as the projections `sizes`.

        sizes: name → outputs, in the checkpoint's order.
        """
        return Weights(SplitReader(self._reader, self._prefix, merged, sizes), self._prefix, adapters=self.adapters)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read the whole tensor, which must have `shape`."""
        return self.slice(name, shape, dim=0, start=0, stop=shape[0])

    def shard(self, name: str, shape: tuple[int, ...], *, dim: int, rank: int, size: int) -> torch.Tensor:
        """Read part `rank` of `size` equal parts along dim. shape: of the whole tensor; size divides shape[dim]."""
        assert shape[dim] % size == 0, f"{name}: {shape} does not split in {size} along {dim}"
        width = shape[dim] // size
        return self.slice(name, shape, dim=dim, start=rank * width, stop=(rank + 1) * width)

    def slice(self, name: str, shape: tuple[int, ...], *, dim: int, start: int, stop: int) -> torch.Tensor:
        """Read [start, stop) along dim. shape: of the whole tensor."""
        return self._reader.read(self.full_name(name), shape, dim=dim, start=start, stop=stop)

    def optional(self, name: str) -> torch.Tensor | None:
        """Read a small tensor that some checkpoints omit; see TensorReader.optional."""
        return self._reader.optional(self.full_name(name))

    def full_name(self, name: str) -> str:
        """Return the tensor's full name in the checkpoint."""
        return self._prefix + name

    def stored(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...],
        *,
        dim: int = 0,
        start: int = 0,
        stop: int | None = None,
    ) -> torch.Tensor:
        """Read [start, stop) along dim of a tensor that has one of `dtypes`, in that dtype. stop: None is the end."""
        end = (shape[dim] if shape else 1) if stop is None else stop
        return self._reader.read(self._prefix + name, shape, dim=dim, start=start, stop=end, stored=dtypes)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's stored shape, None if it is missing or tensors are random."""
        return self._reader.shape_of(self._prefix + name)

    def projection(self, name: str, num_outputs: int) -> Projection:
        """Find the checkpoint's matrix for projection `name`, which has num_outputs."""
        stored, first, total = self._reader.projection(self._prefix + name)
        return Projection(Weights(self._reader, f"{stored}."), stored, first, total or num_outputs)

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Finish the build. Raises ModelError naming unread tensors of the checkpoint or of its adapters."""
        self._reader.finish(has_tied_embeddings=has_tied_embeddings, ignored_prefixes=ignored_prefixes)
        if self.adapters is not None:
            self.adapters.finish()
