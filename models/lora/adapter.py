"""Adapter: one folder saved by PEFT, read as low-rank matrices per projection. Pickle files are never read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from models.errors import ModelError
from models.lora.config import LoraConfig
from models.weights.checkpoint import MAX_NAMES_IN_ERROR

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_WRAPPED = "base_model.model."  # PEFT's prefix for the wrapped model
# Prefixes in checkpoints, and in transformers' modules, whose names PEFT takes: the text part of a multimodal model
# since 4.52, and the layers of Nemotron-H since 5
_RUNTIME_PREFIXES = {"language_model.model.": "model.language_model.", "backbone.": "model."}
# The same of parts of names: Kimi-Linear's MLPs and gates
_RUNTIME_PARTS = {".block_sparse_moe.": ".mlp.", ".self_attn.f_": ".self_attn.forget_gate.f_"}


@dataclass(frozen=True)
class LowRank:
    """An adapter's update of one module: scale * b @ a. Float32, on the CPU."""

    # [rank, in]
    a: torch.Tensor
    # [out, rank], times scale
    b: torch.Tensor


class Adapter:
    """An open adapter; its file stays mapped while the object lives. `tensors`: every tensor name in the file."""

    def __init__(self, name: str, folder: Path) -> None:
        """Open an adapter folder. name: the model name in requests. Raises ModelError."""
        self.name = name
        self.config = LoraConfig.from_folder(folder)
        self._path = folder / WEIGHTS_FILE
        if not self._path.is_file():
            hint = "no other file is read"
            if (folder / _PICKLE).is_file():
                hint = f"{_PICKLE} is a pickle, which is never read: load it with PEFT and save it again"
            raise ModelError(f"{folder}: {WEIGHTS_FILE} is missing; {hint}")
        try:
            self._file = safe_open(self._path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._path}: not a readable safetensors file: {error}") from error
        self.tensors = frozenset(self._file.keys())
        strange = sorted(name for name in self.tensors if not _is_low_rank(name))
        if strange:
            raise ModelError(
                f"{self._path}: only lora_A and lora_B of the layers' projections are served, but the file has"
                f" {_list(strange)}"
            )

    def __repr__(self) -> str:
        return f"Adapter({self.name!r}, {self.config!r})"

    def rank_of(self, module: str) -> int:
        """Return the adapter's rank in a module of the checkpoint; 0: it does not change the module."""
        name = self._find(module)
        return 0 if name is None else self.config.rank_of(name)

    def read(self, module: str, *, in_features: int, out_features: int) -> LowRank:
        """Read the adapter's matrices for a module where rank_of() is not 0. Raises ModelError."""
        name = self._find(module)
        assert name is not None
        rank = self.config.rank_of(name)
        a = self._read(f"{_WRAPPED}{name}.lora_A.weight", (rank, in_features))
        b = self._read(f"{_WRAPPED}{name}.lora_B.weight", (out_features, rank))
        return LowRank(a, b * self.config.scale_of(name))

    def names_of(self, module: str) -> tuple[str, ...]:
        """Return the names of the adapter's tensors for a module, () if it has none."""
        name = self._find(module)
        return () if name is None else tuple(f"{_WRAPPED}{name}.lora_{half}.weight" for half in "AB")

    def refuse_unread(self, read: set[str]) -> None:
        """Raise ModelError unless `read` contains every tensor."""
        unread = sorted(self.tensors - read)
        if unread:
            raise ModelError(
                f"{self._path}: {len(unread)} tensors have no place in this model, so the adapter was made for another"
                f" one or for modules that are not served (embed_tokens, lm_head): {_list(unread)}"
            )

    def _find(self, module: str) -> str | None:
        """Return PEFT's name of a module that the adapter changes, None for other modules. Raises ModelError."""
        for name in _spellings(module):
            halves = [f"{_WRAPPED}{name}.lora_{half}.weight" for half in "AB"]
            stored = [half for half in halves if half in self.tensors]
            if not stored:
                continue
            if len(stored) == 1:
                missing = halves[0] if stored == halves[1:] else halves[1]
                raise ModelError(f"{self._path}: has tensor {stored[0]}, but not {missing}")
            if not self.config.is_target(name):
                raise ModelError(
                    f"{self._path}: has tensor {halves[0]}, which target_modules in {self._where} do not include"
                )
            return name
        if not self.config.takes_whatever_is_stored and any(map(self.config.is_target, _spellings(module))):
            name = _spellings(module)[-1]
            raise ModelError(
                f"{self._path}: tensor {_WRAPPED}{name}.lora_A.weight is missing, but {self._where} names its module"
            )
        return None

    @property
    def _where(self) -> str:
        return Path(self.config.where).name

    def _read(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        try:
            found = self._file.get_slice(name).get_shape()
            if found != list(shape):
                means = f"{self._where} and this model require {list(shape)}"
                raise ModelError(f"{self._path}: tensor {name} has shape {found}, but {means}")
            tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self._path}: tensor {name} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise ModelError(f"{self._path}: tensor {name} is {tensor.dtype}, and only floating-point ones are served")
        return tensor.to(torch.float32)


def _spellings(module: str) -> tuple[str, ...]:
    """Return a module's name in checkpoints and, if it is another, in transformers."""
    name = module
    for stored, runtime in _RUNTIME_PREFIXES.items():
        if module.startswith(stored):
            name = runtime + module.removeprefix(stored)
    for stored, runtime in _RUNTIME_PARTS.items():
        name = name.replace(stored, runtime)
    return (module,) if name == module else (module, name)


def _is_low_rank(name: str) -> bool:
    return name.startswith(_WRAPPED) and name.endswith((".lora_A.weight", ".lora_B.weight"))


def _list(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES_IN_ERROR]) + (", …" if len(names) > MAX_NAMES_IN_ERROR else "")
