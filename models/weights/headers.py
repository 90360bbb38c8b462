"""HeaderReader: the names, dtypes and shapes of a folder's tensors, checked against what a build reads of them.

A build over it (models.build.check_headers) reads no values: a tensor is a meta tensor of the shape and dtype that the
headers of the safetensors files say. Layers that would unpack what they read, quantised ones and experts, ask
HeaderReader.expect() instead, since unpacking thousands of meta tensors takes minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from models.errors import ModelError
from models.weights.checkpoint import (
    FLOATING,
    INDEX_FILE,
    INNER,
    StoredTensor,
    TensorSlice,
    check_unread,
    describe_dtypes,
    read_header,
    read_index,
    weight_files,
)

# Names of safetensors' format
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
ONE_NUMBER: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (1, 1, 1))


@dataclass(frozen=True)
class TensorForm:
    """A name under which a tensor may be stored, and how."""

    name: str  # below the matrix
    shapes: tuple[tuple[int, ...], ...] | None  # any of these; None: any at all
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a layer reads: the first of its forms whose name is stored."""

    forms: tuple[TensorForm, ...]
    is_needed: bool = True
    # the tensor is read only if one of this name is stored, or is not
    beside: str | None = None
    without: str | None = None

    @classmethod
    def of(
        cls, name: str, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...], is_needed: bool = True
    ) -> ExpectedTensor:
        """Return a tensor of one name."""
        return cls((TensorForm(name, shapes, dtypes),), is_needed)


class HeaderReader:
    """TensorReader on the meta device. Raises ModelError for each tensor that a build would not find as it must be."""

    is_random = False

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        """Read the headers. Raises ModelError for missing or broken files, also for files that end too early."""
        self._folder = folder
        self.device = torch.device("meta")
        self.dtype = dtype
        self._files = {path: _read_whole(path) for path in weight_files(folder)}
        self._tensors: dict[str, StoredTensor] = {}
        for tensors in self._files.values():
            self._tensors |= tensors
        index = folder / INDEX_FILE
        if self._files and index.is_file():
            self._tensors = self._indexed(read_index(index))
        self._added_prefix = ""  # for names that the file stores without "model."
        if "embed_tokens.weight" in self._tensors:
            self._added_prefix = INNER
            self._tensors = {INNER + name: stored for name, stored in self._tensors.items()}
        self._were_read: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """True if the folder has no files of weights."""
        return not self._files

    def read(self, part: TensorSlice) -> torch.Tensor:
        """See TensorReader.read: a meta tensor."""
        stored = self._tensors.get(part.name)
        if stored is None:
            self._refuse_missing(part.name, (part.shape,))
        if part.shape != stored.shape:
            self._refuse_shape(part.name, stored, (part.shape,))
        if stored.dtype not in _names_of(part.stored or FLOATING):
            self._refuse_dtype(part.name, stored, part.stored)
        self._were_read.add(part.name)
        shape = list(part.shape)
        if shape:
            shape[part.dim] = part.stop - part.start
        return torch.empty(shape, dtype=_DTYPES[stored.dtype] if part.stored else self.dtype, device=self.device)

    def expect(self, matrix: str, tensors: Iterable[ExpectedTensor]) -> None:
        """Check the tensors of a matrix, which is the full name that all of theirs begin with. Raises ModelError."""
        found = self._tensors
        for tensor in tensors:
            if tensor.beside is not None and f"{matrix}.{tensor.beside}" not in found:
                continue
            if tensor.without is not None and f"{matrix}.{tensor.without}" in found:
                continue
            for form in tensor.forms:
                name = f"{matrix}.{form.name}"
                stored = found.get(name)
                if stored is None:
                    continue
                if form.shapes is not None and stored.shape not in form.shapes:
                    self._refuse_shape(name, stored, form.shapes)
                if stored.dtype not in _names_of(form.dtypes):
                    self._refuse_dtype(name, stored, () if form.dtypes == FLOATING else form.dtypes)
                self._were_read.add(name)
                break
            else:
                if tensor.is_needed:
                    names = " or ".join(form.name for form in tensor.forms)
                    self._refuse_missing(f"{matrix}.{names}", tensor.forms[0].shapes or ())

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """See TensorReader.shape_of."""
        stored = self._tensors.get(name)
        return None if stored is None else stored.shape

    def optional(self, name: str) -> torch.Tensor | None:
        """Return ones of the tensor's shape; see TensorReader.optional."""
        stored = self._tensors.get(name)
        if stored is None:
            return None
        self._were_read.add(name)
        return torch.ones(stored.shape)

    def leave_out(self, prefix: str, parts: Collection[str]) -> None:
        """See TensorReader.leave_out."""
        for name in self._tensors:
            if name.startswith(prefix) and name.removeprefix(prefix).partition(".")[0] in parts:
                self._were_read.add(name)

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        """See TensorReader.finish."""
        unread = [
            name for name, stored in self._tensors.items() if name not in self._were_read and stored.num_bytes > 0
        ]
        check_unread(self._folder, unread, has_tied_embeddings=has_tied_embeddings, ignored_prefixes=ignored_prefixes)

    def _indexed(self, path_of: dict[str, Path]) -> dict[str, StoredTensor]:
        """Return the tensors that the index names. Raises ModelError for one that its file has not."""
        files = {path: self._files[path] for path in set(path_of.values())}
        for name, path in path_of.items():
            if name not in files[path]:
                raise ModelError(f"{path}: tensor {name} is missing, although {INDEX_FILE} names this file for it")
        return {name: files[path][name] for name, path in path_of.items()}

    def _path_of(self, name: str) -> Path:
        stored = name.removeprefix(self._added_prefix)
        return next(path for path, tensors in self._files.items() if stored in tensors)

    def _refuse_missing(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> NoReturn:
        form = f" with shape {_describe_shapes(shapes)}" if shapes and shapes != ((),) else ""
        raise ModelError(f"{self._folder}: tensor {name}{form} is missing from the checkpoint")

    def _refuse_shape(self, name: str, stored: StoredTensor, shapes: tuple[tuple[int, ...], ...]) -> NoReturn:
        raise ModelError(
            f"{self._path_of(name)}: tensor {name} has shape {list(stored.shape)}, but config.json requires"
            f" {_describe_shapes(shapes)}"
        )

    def _refuse_dtype(self, name: str, stored: StoredTensor, dtypes: tuple[torch.dtype, ...]) -> NoReturn:
        known = _DTYPES.get(stored.dtype)
        found = stored.dtype if known is None else describe_dtypes((known,))
        raise ModelError(
            f"{self._path_of(name)}: tensor {name} is {found}, but config.json requires {describe_dtypes(dtypes)}"
        )


def _read_whole(path: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors. Raises ModelError, also for a file that ends before they do."""
    header = read_header(path)
    end = header.num_bytes + max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
    size = path.stat().st_size
    if size < end:
        raise ModelError(f"{path}: has {size} bytes, but its header says {end}: the file ends too early")
    return header.tensors


@functools.cache
def _names_of(dtypes: tuple[torch.dtype, ...]) -> frozenset[str]:
    """Return safetensors' names of dtypes."""
    return frozenset(name for name, dtype in _DTYPES.items() if dtype in dtypes)


def _describe_shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return "one number" if shapes == ONE_NUMBER else " or ".join(str(list(shape)) for shape in shapes)
