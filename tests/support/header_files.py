"""Files of weights without weights: the headers that a checkpoint of some config has, before sparse bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from models.build import build
from models.config.model_config import ModelConfig
from models.parallel import TensorParallel
from models.weights.checkpoint import INDEX_FILE, SINGLE_FILE, TensorSlice
from models.weights.headers import ExpectedTensor, HeaderReader
from models.weights.weights import Weights

Entries = dict[str, tuple[str, tuple[int, ...]]]  # name → safetensors' dtype, shape
_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip


class _Recorder(HeaderReader):
    """Takes every tensor that is asked for as there, in its first form."""

    def __init__(self) -> None:
        self.device = torch.device("meta")
        self.dtype = torch.bfloat16
        self.entries: Entries = {}

    def read(self, part: TensorSlice) -> torch.Tensor:
        self._note(part.name, part.shape, part.stored)
        shape = list(part.shape)
        if shape:
            shape[part.dim] = part.stop - part.start
        return torch.empty(shape, dtype=part.stored[0] if part.stored else self.dtype, device=self.device)

    def expect(self, matrix: str, tensors: Iterable[ExpectedTensor]) -> None:
        for tensor in tensors:
            form = tensor.forms[0]
            if tensor.is_needed and tensor.beside is None:
                self._note(f"{matrix}.{form.name}", (100,) if form.shapes is None else form.shapes[0], form.dtypes)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return None

    def optional(self, name: str) -> torch.Tensor | None:
        return None

    def leave_out(self, prefix: str, parts: Collection[str]) -> None:
        pass

    def finish(self, *, has_tied_embeddings: bool, ignored_prefixes: tuple[str, ...] = ()) -> None:
        pass

    def _note(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        wide = not dtypes or self.dtype in dtypes
        self.entries[name] = (_NAMES[self.dtype if wide else dtypes[0]], shape)


def entries_of(config: ModelConfig) -> Entries:
    """Return the tensors of a checkpoint with this config, in 16 bits where a dtype is free."""
    recorder = _Recorder()
    with torch.inference_mode():
        build(config, Weights(recorder), TensorParallel())
    return recorder.entries


def save_headers(folder: Path, entries: Entries, *, num_files: int = 1) -> None:
    """Write files with these tensors, all of zeros, which take no room on the disk; several files have an index."""
    names, path_of = sorted(entries), {}
    for index in range(num_files):
        path = folder / (SINGLE_FILE if num_files == 1 else f"model-{index + 1:05d}-of-{num_files:05d}.safetensors")
        header, end = {}, 0
        for name in names[index::num_files]:
            dtype, shape = entries[name]
            start, end = end, end + math.prod(shape) * _itemsize(dtype)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            path_of[name] = path.name
        data = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(data).to_bytes(8, "little") + data)
            file.truncate(8 + len(data) + end)
    if num_files > 1:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": path_of}))


def _itemsize(name: str) -> int:
    return next(dtype.itemsize for dtype, known in _NAMES.items() if known == name)
