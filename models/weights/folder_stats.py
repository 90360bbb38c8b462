"""How many weights a folder has, and of which types, by the headers of its safetensors files; no tensor is read."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import ModelError
from models.weights.checkpoint import HARMLESS_SUFFIXES, INDEX_FILE, SINGLE_FILE

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class FolderStats:
    """Counts over all tensors that a model would read."""

    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]  # safetensors' names, the one with the most bytes first


def folder_stats(
    folder: Path, *, needs_head: bool = True, ignored_prefixes: tuple[str, ...] = ()
) -> FolderStats | None:
    """Count a folder's weights; None if it has none. Raises ModelError for files that are missing or broken.

    needs_head: the model has a head of its own; ignored_prefixes: prefixes of tensors that it does not read.
    """
    num_parameters = 0
    num_bytes: Counter[str] = Counter()
    paths = _files(folder)
    for path in paths:
        for name, dtype, shape, size in _tensors(path):
            is_head = name.endswith("lm_head.weight")
            if name.endswith(HARMLESS_SUFFIXES) or name.startswith(ignored_prefixes) or (is_head and not needs_head):
                continue
            num_parameters += math.prod(shape)
            num_bytes[dtype] += size
    if not paths:
        return None
    return FolderStats(num_parameters, num_bytes.total(), tuple(dtype for dtype, _ in num_bytes.most_common()))


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else []
    try:
        names = sorted({Path(str(name)).name for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: malformed index: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) == len(names):
        return []
    if missing:
        raise ModelError(f"{index}: {len(missing)} of its {len(names)} files are missing, first {missing[0]}")
    return [folder / name for name in names]


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield name, dtype, shape and bytes of each tensor: 8 bytes of length, then JSON, is how each file begins."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start, end = tensor["data_offsets"]
            yield name, str(tensor["dtype"]), [int(size) for size in tensor["shape"]], int(end) - int(start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error
