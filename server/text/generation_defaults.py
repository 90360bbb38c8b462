"""GenerationDefaults: a model's default sampling values, read once from its folder. Never torch.

Sources in order: generation_config.json, then config.json and its text_config; the caller adds the tokenizer's
end-of-sequence token if none of them names one. Imports engine.interface.errors and msgspec.
"""

import logging
from pathlib import Path
from typing import Any

import msgspec

from engine.interface.errors import StartupError

logger = logging.getLogger(__name__)

# Fields by which transformers' generate() chooses tokens and Quire does not, with the numbers that change nothing
_WITHOUT_EFFECT = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id")),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beams", "typical_p"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens", "no_repeat_ngram_size"), 0),
}


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
    text = config.get("text_config")  # of a model of several parts
    sources = (generation, config, text if isinstance(text, dict) else {})
    eos = next(filter(None, (_token_ids(source.get("eos_token_id")) for source in sources)), ())
    if not eos and tokenizer_eos_id is not None:
        eos = (tokenizer_eos_id,)
    vocab_size = next((source["vocab_size"] for source in sources[1:] if source.get("vocab_size") is not None), None)
    if type(vocab_size) is int and any(id_ >= vocab_size for id_ in eos):
        logger.warning("eos_token_id=%s beyond the vocabulary of %d tokens is ignored", list(eos), vocab_size)
        eos = tuple(id_ for id_ in eos if id_ < vocab_size)
    asked = [name for name, neutral in _WITHOUT_EFFECT.items() if generation.get(name) not in (None, [], {}, neutral)]
    if asked:
        logger.warning("file=generation_config.json fields=%s have no effect", ",".join(sorted(asked)))
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
