"""read_config(): the ModelConfig of a folder, by Quire's own implementation of its architecture or by transformers'.

transformers' model classes are imported only for a folder that needs them.
"""

from __future__ import annotations

from pathlib import Path

from models.config.model_config import ModelConfig
from models.errors import ModelError, parse_json
from models.registry import is_served

IMPLEMENTATIONS = ("auto", "quire", "transformers")
# What a model computed by transformers' own class does without
_LOST = "slower, without CUDA graphs, quantisation, LoRA adapters and tensor parallelism"


def read_config(folder: Path, implementation: str = "auto") -> ModelConfig:
    """Read folder/config.json for an implementation (IMPLEMENTATIONS). Raises ModelError.

    auto: transformers' own class only where Quire has no implementation of the architecture.
    """
    if implementation == "quire" or (implementation == "auto" and _is_own(folder)):
        return ModelConfig.from_folder(folder)
    from models.foreign.config import foreign_config

    if implementation == "transformers":
        return foreign_config(folder)
    try:
        return foreign_config(folder)
    except ModelError as error:
        try:
            ModelConfig.from_folder(folder)
        except ModelError as own:
            raise ModelError(f"{own}. Its class of transformers cannot serve it either: {error}") from error
        raise


def describe_class(config: ModelConfig) -> str | None:
    """Return by what a model is computed, if not by Quire's own layers, and what is lost by it."""
    return f"transformers' own class: {_LOST}" if config.is_foreign else None


def _is_own(folder: Path) -> bool:
    """Return whether Quire has the architecture, or the config is so wrong that its own reader should say why."""
    path = folder / "config.json"
    if not path.is_file():
        return True
    raw = parse_json(path.read_bytes(), where=str(path))
    names = raw.get("architectures") if isinstance(raw, dict) else None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return True
    return is_served(names[0])
