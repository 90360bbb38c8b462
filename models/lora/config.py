"""LoraConfig: the checked fields of PEFT's adapter_config.json.

Only `scale * B @ A` added to a projection is supported. A field that asks for anything else is refused by name, never
ignored.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import ModelError, parse_json
from models.fields import Fields

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"

# Fields that must be off, and the feature each one enables
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of adapters",
    "modules_to_save": "whole modules beside the adapter",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "parameters that are no linear layers, such as experts,",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "fan_in_fan_out": "weights stored as (inputs, outputs)",
    "megatron_config": "Megatron's layers",
}
# Initialisations that leave the model's own weights unchanged; all others change them
_INITS = (True, False, "gaussian", "orthogonal", "eva")
# Without effect after training
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "task_type", "velora_config",
}  # fmt: skip
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
}  # fmt: skip
_ALL_LINEAR = "all-linear"
_UNSERVED_MODULES = ("model.embed_tokens", "lm_head")
_LAYER_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class LoraConfig:
    """Settings of one adapter. Module names are those of the wrapped model: "model.layers.0.self_attn.q_proj"."""

    where: str  # path of the file, for errors
    rank: int
    alpha: float
    is_rank_stabilized: bool
    target_modules: str | tuple[str, ...] | None  # a pattern, or (ends of) names; None: all with stored tensors
    exclude_modules: str | tuple[str, ...]
    layers: tuple[int, ...] | None  # layer indices; None: all
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def from_folder(cls, folder: Path) -> LoraConfig:
        """Read folder/adapter_config.json. Raises ModelError naming the file and the field."""
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise ModelError(f"{folder}: no {CONFIG_FILE}, so this is not a folder that PEFT saved an adapter to")
        try:
            raw = parse_json(path.read_bytes(), where=str(path))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        if not isinstance(raw, Mapping):
            raise ModelError(f"{path}: expected a JSON object, found {type(raw).__name__}")
        return cls.from_json(raw, where=str(path))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], *, where: str = CONFIG_FILE) -> LoraConfig:
        """Check a parsed adapter_config.json. where: names it in errors. Raises ModelError."""
        fields = Fields(raw, where)
        _refuse_unsupported(fields)
        target_modules = _names(fields, "target_modules")
        config = cls(
            where=where,
            rank=fields.count("r"),
            alpha=fields.positive("lora_alpha"),
            is_rank_stabilized=fields.flag("use_rslora"),
            target_modules=target_modules,
            exclude_modules=_names(fields, "exclude_modules") or (),
            layers=_layers(fields, has_pattern=isinstance(target_modules, str)),
            rank_pattern=_pattern(fields, "rank_pattern", Fields.count),
            alpha_pattern=_pattern(fields, "alpha_pattern", Fields.positive),
        )
        for module in _UNSERVED_MODULES:
            if not config.takes_whatever_is_stored and config.is_target(module):
                raise ModelError(f"{where}: target_modules names {module}, and adapters of it are not supported")
        return config

    @property
    def takes_whatever_is_stored(self) -> bool:
        """Return True if target_modules is not given: the stored tensors alone show which modules are changed."""
        names = self.target_modules
        return names is None or (isinstance(names, str) and names.lower() == _ALL_LINEAR)

    def is_target(self, module: str) -> bool:
        """Return True if the adapter changes this module, an inner linear layer of the model."""
        if self._names_module(self.exclude_modules, module):
            return False
        if self.layers is not None:
            index = _LAYER_INDEX.search(module)
            if index is None or int(index[1]) not in self.layers:
                return False
        return self.takes_whatever_is_stored or self._names_module(self.target_modules or (), module)

    def rank_of(self, module: str) -> int:
        """Return the adapter's rank in a module."""
        return _first_match(self.rank_pattern, module) or self.rank

    def scale_of(self, module: str) -> float:
        """Return the factor of B @ A: alpha / r, or alpha / sqrt(r) if rank-stabilized (arXiv:2312.03732)."""
        rank, alpha = self.rank_of(module), _first_match(self.alpha_pattern, module) or self.alpha
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    @staticmethod
    def _names_module(names: str | tuple[str, ...], module: str) -> bool:
        if isinstance(names, str):
            return re.fullmatch(names, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)


def _refuse_unsupported(fields: Fields) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{fields.where}: peft_type {kind!r} is not supported: only 'LORA' is")
    for name, meaning in _UNSUPPORTED.items():
        if fields.get(name):
            raise ModelError(f"{fields.where}: {name} is set, and {meaning} {_are(meaning)} not supported")
    bias = fields.get("bias")
    if bias not in (None, "none"):
        raise ModelError(f"{fields.where}: bias {bias!r} is not supported: only adapters trained with 'none' are")
    init = fields.get("init_lora_weights")
    if init is not None and init not in _INITS:
        raise ModelError(
            f"{fields.where}: init_lora_weights {init!r} is not supported, since it changes the model's own weights: "
            "save the adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    unknown = sorted(
        name for name, value in fields.raw.items() if value and name not in _READ | _HARMLESS | set(_UNSUPPORTED)
    )
    if unknown:
        logger.warning("unknown fields have no effect: file=%s fields=%s", fields.where, ",".join(unknown))


def _are(meaning: str) -> str:
    return "are" if meaning.split(" ", 1)[0].endswith("s") else "is"


def _names(fields: Fields, name: str) -> str | tuple[str, ...] | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ModelError(f"{fields.where}: {name} {value!r} is not a regular expression: {error}") from error
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{fields.where}: {name} must be a pattern or a list of names, found {value!r}")
    return tuple(value)


def _layers(fields: Fields, *, has_pattern: bool) -> tuple[int, ...] | None:
    value, pattern = fields.get("layers_to_transform"), fields.get("layers_pattern")
    if value is None or value == []:
        return None
    if has_pattern:
        raise ModelError(f"{fields.where}: layers_to_transform needs target_modules to be a list of names")
    if pattern not in (None, "", [], "layers", ["layers"]):
        raise ModelError(f"{fields.where}: layers_pattern {pattern!r} is not supported: the layers here are 'layers'")
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in layers):
        raise ModelError(f"{fields.where}: layers_to_transform must be indices of layers, found {value!r}")
    return tuple(layers)


def _pattern(fields: Fields, name: str, read: Callable[[Fields, str], Any]) -> dict[str, Any]:
    """Read a mapping from patterns of module names to numbers; `read` checks each entry."""
    section = fields.section(name)
    for pattern in section.raw:
        try:
            re.compile(_ending(pattern))
        except re.error as error:
            raise ModelError(
                f"{fields.where}: {name} has {pattern!r}, which is not a regular expression: {error}"
            ) from error
    return {pattern: read(section, pattern) for pattern in section.raw}


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _first_match(values: Mapping[str, Any], module: str) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, None without a match."""
    found = (value for pattern, value in values.items() if re.match(_ending(pattern), module))
    return next(found, None)
