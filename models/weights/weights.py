"""Weights: a checkpoint's tensors, pulled by name while the model is built.

A layer asks for what it needs (`w / "layers.0" / "self_attn"`, then tensor or slice). Each read goes straight to the
device and dtype, and only this rank's slice is read from the file. After the build, finish() raises an error for every
tensor that no layer asked for: a partly read checkpoint is a wrong model. Weights.split presents a projection that a
checkpoint stores merged (such as qkv_proj) as its parts. The readers are in models/weights/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from models.weights.checkpoint import Progress, RandomReader, SafetensorsReader, TensorSlice
from models.weights.headers import HeaderReader


class Companion(Protocol):
    """A second source of weights that the layers of one build read, such as LoRA adapters."""

    def finish(self) -> None:
        """Check after the build that all tensors were read. Raises ModelError naming unread tensors."""
        ...


class TensorReader(Protocol):
    """A source of tensors by full name, on one device and in one dtype."""

    device: torch.device
    dtype: torch.dtype
    is_random: bool  # any requested tensor is made; nothing is stored

    def read(self, part: TensorSlice) -> torch.Tensor:
        """Return the part as a new tensor. Raises ModelError."""
        ...

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of tensor `name`, None if it is missing or tensors are random."""
        ...

    def optional(self, name: str) -> torch.Tensor | None:
        """Read a small tensor of any shape in fp32 on the CPU; None if it is missing. Raises ModelError."""
        ...

    def leave_out(self, prefix: str, parts: Collection[str]) -> None:
        """Count the tensors `<prefix><part>.…` of these parts as read, without reading them."""
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

    def __init__(
        self,
        reader: TensorReader,
        prefix: str = "",
        *,
        adapters: Companion | None = None,
        bands: Mapping[str, _Band] = MappingProxyType({}),  # by full name
    ) -> None:
        self._reader = reader
        self._prefix = prefix
        self._bands = bands
        self.adapters = adapters
        self.device = reader.device
        self.dtype = reader.dtype
        self.is_random = reader.is_random
        # there are names, dtypes and shapes alone, as a check before the weights are read; None: there are values
        self.headers = reader if isinstance(reader, HeaderReader) else None

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

    @classmethod
    def of_headers(cls, folder: Path, *, dtype: torch.dtype) -> Weights:
        """Read the headers of the folder's files alone; see HeaderReader. Raises ModelError."""
        return cls(HeaderReader(Path(folder), dtype=dtype))

    def __truediv__(self, part: str) -> Weights:
        return Weights(self._reader, f"{self._prefix}{part}.", adapters=self.adapters, bands=self._bands)

    def split(self, merged: str, sizes: Mapping[str, int]) -> Weights:
        """Return a view that presents the checkpoint's projection `merged` as the projections `sizes`.

        sizes: name → outputs, in the checkpoint's order.
        """
        bands, first, total = dict(self._bands), 0, sum(sizes.values())
        for part, size in sizes.items():
            bands[self.full_name(part)] = _Band(self.full_name(merged), first, size, total)
            first += size
        return Weights(self._reader, self._prefix, adapters=self.adapters, bands=bands)

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
        return self._read(TensorSlice(self.full_name(name), shape, dim, start, stop))

    def optional(self, name: str) -> torch.Tensor | None:
        """Read a small tensor that some checkpoints omit; see TensorReader.optional."""
        return self._reader.optional(self.full_name(name))

    def leave_out(self, block: str, parts: Collection[str]) -> None:
        """Leave the tensors `<block>.<part>.…` to another rank, so that finish() does not miss them."""
        self._reader.leave_out(self.full_name(f"{block}."), parts)

    def give_back_unused(self) -> None:
        """Return the allocator's unused memory to the GPU: what reading and quantising took. Blocks."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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
        return self._read(TensorSlice(self.full_name(name), shape, dim, start, end, dtypes))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's stored shape, None if it is missing or tensors are random."""
        return self._reader.shape_of(self.full_name(name))

    def first_of(self, *names: str, tensor: str) -> str:
        """Return the first name under which the checkpoint has a tensor, or the first name of all."""
        return next((name for name in names if self.shape_of(f"{name}.{tensor}") is not None), names[0])

    def projection(self, name: str, num_outputs: int) -> Projection:
        """Find the checkpoint's matrix for projection `name`, which has num_outputs."""
        full_name = self.full_name(name)
        band = self._bands.get(full_name, _Band(full_name, 0, num_outputs, num_outputs))
        return Projection(Weights(self._reader, f"{band.merged}."), band.merged, band.first_output, band.num_merged)

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Finish the build. Raises ModelError naming unread tensors of the checkpoint or of its adapters."""
        self._reader.finish(has_tied_embeddings=has_tied_embeddings, ignored_prefixes=ignored_prefixes)
        if self.adapters is not None:
            self.adapters.finish()

    def _read(self, part: TensorSlice) -> torch.Tensor:
        projection, _, tensor = part.name.rpartition(".")
        band = self._bands.get(projection)
        return self._reader.read(part if band is None else band.map(part, tensor))


@dataclass(frozen=True)
class _Band:
    """The outputs of a projection within the merged projection that the checkpoint stores."""

    merged: str  # full name
    first_output: int
    num_outputs: int
    num_merged: int  # outputs of the merged projection

    def map(self, part: TensorSlice, tensor: str) -> TensorSlice:
        """Return a part of the projection's `tensor` as a part of the merged one's, in proportion to the outputs."""
        size = part.shape[part.dim]
        offset = size * self.first_output // self.num_outputs
        merged_size = size * self.num_merged // self.num_outputs
        shape = (*part.shape[: part.dim], merged_size, *part.shape[part.dim + 1 :])
        start, stop = offset + part.start, offset + part.stop
        return TensorSlice(f"{self.merged}.{tensor}", shape, part.dim, start, stop, part.stored)
