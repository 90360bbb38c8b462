"""TensorReaders behind Weights: SafetensorsReader for a model folder, RandomReader for dummy weights.

folder_stats counts a folder's parameters and dtypes from the headers of its safetensors files, without reading tensors.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from models.errors import ModelError, parse_json

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes_done, bytes_total)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INNER = "model."  # prefix of all tensors but the head's; a model saved without its head omits it
# Buffers in old checkpoints that every model recomputes
HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
MAX_NAMES_IN_ERROR = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class TensorSlice:
    """The part [start, stop) along dim of the tensor `name`, which must have `shape`; () is a scalar."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    # the tensor must have one of these dtypes and keeps it; (): the part gets the model's dtype
    stored: tuple[torch.dtype, ...] = ()


class SafetensorsReader:
    """Reads slices of a model folder's safetensors files. Files stay mapped from __init__ to finish()."""

    is_random = False

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
    ) -> None:
        self._folder = folder
        self.device = device
        self.dtype = dtype
        self._progress = progress
        self._files: dict[Path, safe_open] = {}
        self._path_of = self._index()
        self._added_prefix = ""  # for names that the file stores without "model."
        if "embed_tokens.weight" in self._path_of:
            self._added_prefix = INNER
            self._path_of = {INNER + name: path for name, path in self._path_of.items()}
        self._unread = dict.fromkeys(self._path_of)
        self._bytes_done = 0
        self._bytes_total = sum(path.stat().st_size for path in self._files)

    def read(self, part: TensorSlice) -> torch.Tensor:
        """See TensorReader.read."""
        name, shape = part.name, part.shape
        if name not in self._path_of:
            form = f" with shape {list(shape)}" if shape else ""
            raise ModelError(f"{self._folder}: tensor {name}{form} is missing from the checkpoint")
        path = self._path_of[name]
        try:
            whole = self._files[path].get_slice(self._stored_name(name))
            found = whole.get_shape()
            if found != list(shape):
                raise ModelError(f"{path}: tensor {name} has shape {found}, but config.json requires {list(shape)}")
            if shape:
                values = whole[(slice(None),) * part.dim + (slice(part.start, part.stop),)]
            else:
                values = self._files[path].get_tensor(self._stored_name(name))
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error
        if values.dtype not in (part.stored or FLOATING):
            found, wanted = describe_dtypes((values.dtype,)), describe_dtypes(part.stored)
            raise ModelError(f"{path}: tensor {name} is {found}, but config.json requires {wanted}")
        self._record(name, math.prod(shape) * values.element_size())
        # copy: a tensor still mapped onto the file would change, or fault, when the file does
        return values.to(self.device, values.dtype if part.stored else self.dtype, copy=True)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """See TensorReader.shape_of."""
        path = self._path_of.get(name)
        return None if path is None else tuple(self._files[path].get_slice(self._stored_name(name)).get_shape())

    def optional(self, name: str) -> torch.Tensor | None:
        """Read a whole tensor, None if it is missing; see TensorReader.optional."""
        if name not in self._path_of:
            return None
        path = self._path_of[name]
        try:
            stored = self._files[path].get_tensor(self._stored_name(name))
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error
        self._record(name, stored.nbytes)
        return stored.to(torch.float32, copy=True)

    def leave_out(self, prefix: str, parts: Collection[str]) -> None:
        """See TensorReader.leave_out."""
        below = [name for name in self._unread if name.startswith(prefix)]
        for name in below:
            if name.removeprefix(prefix).partition(".")[0] in parts:
                self._record(name, self._sizes[name])

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Unmap the files; see TensorReader.finish."""
        unread = [name for name in self._unread if self._sizes[name] > 0] if self._unread else []
        self._files.clear()
        num_ignored = check_unread(
            self._folder, unread, has_tied_embeddings=has_tied_embeddings, ignored_prefixes=ignored_prefixes
        )
        if num_ignored:
            logger.warning(
                "tensors of pictures, sounds and guesses of further tokens are not read: tensors=%d prefixes=%s",
                num_ignored,
                ",".join(ignored_prefixes),
            )
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """The bytes of each tensor, by its full name."""
        headers = (read_header(path) for path in self._files)
        return {
            self._added_prefix + name: tensor.num_bytes for header in headers for name, tensor in header.tensors.items()
        }

    def _stored_name(self, name: str) -> str:
        return name.removeprefix(self._added_prefix)

    def _record(self, name: str, num_bytes: int) -> None:
        if name not in self._unread:
            return
        del self._unread[name]
        self._bytes_done += num_bytes
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)

    def _index(self) -> dict[str, Path]:
        """Open every file; map each tensor to its file."""
        index_path = self._folder / INDEX_FILE
        if index_path.is_file():
            return self._index_shards(index_path)
        path = self._folder / SINGLE_FILE
        if not path.is_file():
            raise ModelError(f"{self._folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}, and no other format is read")
        return dict.fromkeys(self._open(path), path)

    def _index_shards(self, index_path: Path) -> dict[str, Path]:
        file_of = read_index(index_path)
        for path in dict.fromkeys(file_of.values()):
            if not path.is_file():
                raise ModelError(f"{index_path}: names {path.name}, which is not in the folder")
            stored = set(self._open(path))
            for name in (name for name, file in file_of.items() if file == path):
                if name not in stored:
                    raise ModelError(f"{path}: tensor {name} is missing, although {INDEX_FILE} names this file for it")
        return file_of

    def _open(self, path: Path) -> list[str]:
        try:
            self._files[path] = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a readable safetensors file: {error}") from error
        return list(self._files[path].keys())


class RandomReader:
    """Draws normal(0, std) weights from a seed and the tensor's name. Norms are ones; biases are drawn like weights.

    The whole tensor is drawn before it is sliced, so that ranks hold slices of the same model for every split. On the
    meta device tensors have shapes without values.
    """

    is_random = True

    def __init__(self, *, device: torch.device, dtype: torch.dtype, seed: int, std: float = 0.02) -> None:
        self.device = device
        self.dtype = dtype
        self._seed = seed
        self._std = std

    def read(self, part: TensorSlice) -> torch.Tensor:
        """Draw the part; see TensorReader.read. Integers are uniform over their dtype's range."""
        whole = self._draw(part.name, part.shape, part.stored[0] if part.stored else self.dtype)
        if not part.shape:
            return whole
        values = whole.narrow(part.dim, part.start, part.stop - part.start)
        return values if values.shape == whole.shape else values.contiguous().clone()

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return None: nothing is stored."""
        return None

    def optional(self, name: str) -> torch.Tensor | None:
        """Return None: there are no optional tensors."""
        return None

    def leave_out(self, prefix: str, parts: Collection[str]) -> None:
        """Do nothing, as in finish()."""

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        """Do nothing: no file is open, and no tensor can be unread."""

    def _draw(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device, dtype=dtype)
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device, dtype=dtype)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            end = min(limits.max + 1, torch.iinfo(torch.int64).max)  # without the last value 4-bit codes have a mean
            return torch.empty(shape, device=self.device, dtype=dtype).random_(limits.min, end, generator=generator)
        drawn = torch.empty(shape, device=self.device, dtype=dtype if dtype.itemsize > 1 else torch.bfloat16)
        return drawn.normal_(0.0, self._std, generator=generator).to(dtype)


@dataclass(frozen=True)
class FolderStats:
    """Counts over all tensors that a model reads."""

    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]  # safetensors' names, the one with the most bytes first


def folder_stats(
    folder: Path, *, needs_head: bool = True, ignored_prefixes: tuple[str, ...] = ()
) -> FolderStats | None:
    """Count a folder's weights; None if it has none. Raises ModelError for missing or broken files.

    needs_head: the model has its own head; ignored_prefixes: prefixes of tensors that it does not read.
    """
    num_parameters = 0
    num_bytes: Counter[str] = Counter()
    paths = weight_files(folder)
    for path in paths:
        for name, tensor in read_header(path).tensors.items():
            is_head = name.endswith("lm_head.weight")
            if name.endswith(HARMLESS_SUFFIXES) or name.startswith(ignored_prefixes) or (is_head and not needs_head):
                continue
            num_parameters += math.prod(tensor.shape)
            num_bytes[tensor.dtype] += tensor.num_bytes
    if not paths:
        return None
    return FolderStats(num_parameters, num_bytes.total(), tuple(dtype for dtype, _ in num_bytes.most_common()))


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's files of weights, none if there are none. Raises ModelError for missing or broken files."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else []
    names = sorted(path.name for path in set(read_index(index).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) == len(names):
        return []
    if missing:
        raise ModelError(f"{index}: {len(missing)} of its {len(names)} files are missing, first {missing[0]}")
    return [folder / name for name in names]


def read_index(index: Path) -> dict[str, Path]:
    """Return each tensor's file, as model.safetensors.index.json has it. Raises ModelError."""
    try:
        weight_map = parse_json(index.read_bytes(), where=f"{index}: malformed index")["weight_map"]
        paths = {file: index.parent / Path(file).name for file in set(weight_map.values())}
        return {str(name): paths[file] for name, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: malformed index: {error!r}") from error


def check_unread(
    folder: Path, names: Iterable[str], *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...]
) -> int:
    """Raise ModelError if a build left tensors that have no place in the model; return how many it may ignore."""
    unread = [name for name in names if not name.endswith(HARMLESS_SUFFIXES)]
    served = [name for name in unread if not name.startswith(ignored_prefixes)]
    num_ignored = len(unread) - len(served)
    if has_tied_embeddings:
        served = [name for name in served if not name.endswith("lm_head.weight")]
    if served:
        listed = ", ".join(served[:MAX_NAMES_IN_ERROR]) + (", …" if len(served) > MAX_NAMES_IN_ERROR else "")
        raise ModelError(f"{folder}: {len(served)} tensors have no place in the model: {listed}")
    return num_ignored


def describe_dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the names of dtypes, of which a tensor must have one; (): any that is read as the model's."""
    if not dtypes:
        return "a float of 16 bits or more"
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str = ""  # safetensors' name
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)  # begin and end in bytes, behind the header

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its values."""
        return self.data_offsets[1] - self.data_offsets[0]


class Header(NamedTuple):
    """The header of a safetensors file."""

    num_bytes: int  # with its length
    tensors: dict[str, StoredTensor]


_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])

_TENSOR_DECODER = msgspec.json.Decoder(StoredTensor)


def read_header(path: Path) -> Header:
    """Read a file's header: 8 bytes of its length, then JSON. Raises ModelError."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            parts = _DECODER.decode(file.read(length))
        parts.pop("__metadata__", None)  # texts, under any names
        tensors = {name: _TENSOR_DECODER.decode(part) for name, part in parts.items()}
        unknown = next((name for name, tensor in tensors.items() if not tensor.dtype), None)
        if unknown is not None:
            raise ValueError(f"tensor {unknown} has no dtype")
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error
    return Header(8 + length, tensors)
