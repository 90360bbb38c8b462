"""GenerationDefaults: a model's default sampling values, read once from its folder. Never torch.

Sources in order: generation_config.json, then config.json; the caller adds the tokenizer's end-of-sequence token if
neither names one. Imports engine.interface.errors and msgspec.
"""

import logging
from pathlib import Path
from typing import Any

import msgspec

from engine.interface.errors import StartupError

logger = logging.getLogger(__name__)


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the fields that a request leaves out. Values out of range in the files count as absent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # of a chat's answer; None: the rest of the context
    eos_token_ids: tuple[int, ...] = ()


def load_generation_defaults(folder: Path, *, tokenizer_eos_id: int | None) -> GenerationDefaults:
    """Read the model's defaults. `tokenizer_eos_id` is used when no config names an end-of-sequence id."""
    generation = read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")
    eos = _token_ids(generation.get("eos_token_id")) or _token_ids(config.get("eos_token_id"))
    if not eos and tokenizer_eos_id is not None:
        eos = (tokenizer_eos_id,)
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is int and any(id_ >= vocab_size for id_ in eos):
        logger.warning("eos_token_id=%s beyond the vocabulary of %d tokens is ignored", list(eos), vocab_size)
        eos = tuple(id_ for id_ in eos if id_ < vocab_size)
    return GenerationDefaults(
        temperature=_number(generation, "temperature", 1.0, low=0.0, high=2.0),
        top_p=_number(generation, "top_p", 1.0, low=0.0, high=1.0),
        top_k=int(_number(generation, "top_k", 0, low=0, high=1_000_000)),
        min_p=_number(generation, "min_p", 0.0, low=0.0, high=1.0),
        max_new_tokens=int(_number(generation, "max_new_tokens", 0, low=1, high=1e9)) or None,
        repetition_penalty=_number(generation, "repetition_penalty", 1.0, low=0.01, high=10.0),
        eos_token_ids=eos,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} if there is no such file. Raises StartupError if it is not an object."""
    if not path.is_file():
        return {}
    try:
        value = msgspec.json.decode(path.read_bytes())
    except RecursionError as error:
        raise StartupError(f"{path} cannot be read as JSON: arrays or objects are nested too deeply.") from error
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object.")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(id_ for id_ in ids if type(id_) is int and id_ >= 0)


def _number(source: dict[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    value: Any = source.get(name)
    if type(value) not in (int, float) or not low <= value <= high:
        return default
    return float(value)
