"""The sampling parameters: each is declared once, in a class below, with its type, bounds, default and documentation.

    SharedSampling ─→ chat, completions, responses, messages        OpenAISampling ─→ chat, completions

The schemas inherit these classes. wire_values() checks a body's parameters against the model and returns them by their
names in SamplingParams (engine/interface/protocol.py), where their effect begins. docs/reference/api.md has its table
from here. Parameters that each API has in a form of its own (max_tokens, stop, logprobs) are in the schemas.
Imports engine.interface, pydantic and server.text.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, GetPydanticSchema, PlainSerializer, WithJsonSchema

from engine.interface.errors import InvalidParameter
from engine.interface.protocol import EngineReady
from server.api.strict_json import StrictModel
from server.text.generation_defaults import GenerationDefaults
from server.text.tokenizer import Tokenizer

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_TOKENS = 2**31 - 1  # a bound for arithmetic; the context is the real limit
_GREEDY_BELOW = 1e-4  # a smaller temperature would overflow logits / temperature
_SEED_BITS = 2**63 - 1
_IDS_AT_ONCE = 2**14  # of a long list: no other thread runs within min() and max()


class ModelFacts(NamedTuple):
    """Data of the model for the checks and conversions of parameters."""

    limits: EngineReady
    defaults: GenerationDefaults
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class SamplingField:
    """Properties of a sampling parameter besides its name, type and bounds."""

    documentation: str  # its line in docs/reference/api.md; neighbours with the same line share a row
    # Where the value of a request without it comes from: SamplingParams, or the field of this name in
    # GenerationDefaults, which generation_config.json fills
    default: Literal["engine", "model"] = "engine"
    has_token_ids: bool = False  # its items, or keys, must be in the vocabulary
    to_wire: Callable[[Any, ModelFacts], Any] | None = None  # from the body's value to that of SamplingParams


def _logit_bias(value: dict[str, float]) -> dict[int, float]:
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries, the limit is {MAX_LOGIT_BIAS}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"has the key {key[:40]!r}, keys are token ids")
        if not -100 <= number <= 100:
            raise ValueError(f"has the value {number} for token {key}, values are from -100 to 100")
        if int(key) in bias:
            raise ValueError(f"has the token {int(key)} twice")
        bias[int(key)] = number
    return bias


def _top_k(value: int, model: ModelFacts) -> int:
    return value if 0 < value < model.limits.vocab_size else 0


def _bad_words(words: list[str], model: ModelFacts) -> list[list[int]]:
    """Return the token ids of each word at the beginning of a text, after a space, and right after other text."""
    encode, encode_inner = model.tokenizer.encode, model.tokenizer.encode_inner
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        bare = word.lstrip(" ") or word
        texts = (bare,) if bare.isspace() else (bare, f" {bare}")
        ids = [encode_inner(bare), *(encode(text, add_special_tokens=False) for text in texts)]
        if not any(ids):
            raise InvalidParameter(f"bad_words[{place}] has no tokens in this model's vocabulary.", param="bad_words")
        found |= dict.fromkeys(tuple(word_ids) for word_ids in ids if word_ids)
    return [list(word_ids) for word_ids in found]


_TextLogitBias = Annotated[dict[str, float], AfterValidator(_logit_bias), PlainSerializer(dict)]  # as JSON has it
LogitBias = Annotated[
    dict[int, float],
    GetPydanticSchema(lambda _, handler: handler(_TextLogitBias)),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
TOKEN_ID_SCHEMA = {"type": "integer", "format": "token-id", "minimum": 0, "maximum": 2**31 - 1}
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1), WithJsonSchema(TOKEN_ID_SCHEMA)]
_BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


class SharedSampling(StrictModel):
    """The sampling parameters that every API takes, by one name."""

    temperature: Annotated[
        float | None,
        Field(ge=0, le=2),
        SamplingField(
            "0 to 2; below 0.0001 it is greedy",
            default="model",
            to_wire=lambda value, _: value if value >= _GREEDY_BELOW else 0.0,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Field(ge=0, le=1),
        SamplingField("0 to 1; 0 leaves only the most likely token", default="model"),
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=-(2**63), lt=2**63),
        SamplingField(
            "any 64-bit integer, the sign bit unused. Choice `i` of the answer uses `seed + i`; with several prompts, "
            "all choices of the first come first. "
            "The same seed draws the same tokens alone or in a batch, as far as the logits are the same",
            to_wire=lambda value, _: value & _SEED_BITS,
        ),
    ] = None
    bad_words: Annotated[
        list[_BadWord] | None,
        Field(max_length=MAX_BAD_WORDS),
        SamplingField(
            f"up to {MAX_BAD_WORDS} strings, each of 1 to {MAX_BAD_WORD_CHARS} characters; case counts. A string is "
            "encoded with a space before it and without, and its last token is not sampled after its other tokens. "
            "The same text in other tokens is not found",
            to_wire=_bad_words,
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[TokenId] | None,
        Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS),
        SamplingField(
            f"1 to {MAX_ALLOWED_TOKEN_IDS:,} ids of the vocabulary: no other token is sampled, not even a stop token",
            has_token_ids=True,
        ),
    ] = None


class OpenAISampling(SharedSampling):
    """The sampling parameters of chat and completions."""

    top_k: Annotated[
        int | None, Field(ge=-1, le=2**31 - 1), SamplingField("0 or -1: off", default="model", to_wire=_top_k)
    ] = None
    min_p: Annotated[float | None, Field(ge=0, le=1), SamplingField("0 to 1", default="model")] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2), SamplingField("-2 to 2, over generated tokens")] = (
        None
    )
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2), SamplingField("-2 to 2, over generated tokens")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None,
        Field(ge=0.01, le=10),
        SamplingField("0.01 to 10, over prompt and generated tokens", default="model"),
    ] = None
    min_tokens: Annotated[
        int | None,
        Field(ge=0, le=MAX_TOKENS),
        SamplingField(
            "not more than `max_tokens`; until then no stop token is sampled, and no stop string is looked for"
        ),
    ] = None
    logit_bias: Annotated[
        LogitBias | None,
        SamplingField(f"up to {MAX_LOGIT_BIAS:,} token ids, -100 to 100 each", has_token_ids=True),
    ] = None
    stop_token_ids: Annotated[
        list[TokenId] | None,
        Field(max_length=MAX_STOP_TOKEN_IDS),
        SamplingField(
            f"up to {MAX_STOP_TOKEN_IDS:,} ids of the vocabulary; generation stops at one of them", has_token_ids=True
        ),
    ] = None


def sampling_fields(schema: type[BaseModel]) -> dict[str, SamplingField]:
    """Return the sampling parameters that a schema declares here, by name and in order."""
    found = ((name, item) for name, info in schema.model_fields.items() for item in info.metadata)
    return {name: item for name, item in found if isinstance(item, SamplingField)}


def shared_values(body: SharedSampling) -> dict[str, Any]:
    """Return a body's values of the parameters that every API takes, for the chat request that it stands for."""
    return {name: getattr(body, name) for name in _SHARED}


def wire_values(body: OpenAISampling, model: ModelFacts) -> dict[str, Any]:
    """Return the parameters that have a value, the body's or the model's, by their names in SamplingParams.

    Raises InvalidParameter for token ids outside the vocabulary.
    """
    values: dict[str, Any] = {}
    for name, field in _ALL.items():
        value = getattr(body, name)
        if value is None and field.default == "model":
            value = getattr(model.defaults, name)
        if value is None:
            continue
        if field.has_token_ids:
            check_ids(value, name, model.limits)
        values[name] = value if field.to_wire is None else field.to_wire(value, model)
    return values


def check_ids(ids: Collection[int], field: str, limits: EngineReady) -> None:
    """Refuse ids outside the vocabulary."""
    rest = iter(ids)
    while some := list(islice(rest, _IDS_AT_ONCE)):
        if min(some) >= 0 and max(some) < limits.vocab_size:  # fast: there can be a million
            continue
        wrong = next(token_id for token_id in some if not 0 <= token_id < limits.vocab_size)
        last = limits.vocab_size - 1
        raise InvalidParameter(f"{field} has the token id {wrong}; ids are from 0 to {last}.", param=field)


_SHARED = sampling_fields(SharedSampling)
_ALL = sampling_fields(OpenAISampling)
