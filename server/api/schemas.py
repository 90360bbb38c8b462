"""Request bodies of chat, completions, /tokenize and /detokenize. Imports pydantic.

They are strict: every number is bounded and every list is limited before any loop. null means absent for every optional
field. Unknown fields are kept in model_extra, which server/api/ignored_fields.py reports; known but unsupported fields
are plain JSON here, and server/api/generation_spec.py refuses them. server/api/strict_json.py parses the JSON.

Of the fields of /tokenize and /detokenize, `content`, `add_special` and `with_pieces` have llama.cpp's names and the
others vLLM's.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from server.api.prompt_pins import PromptCacheOptions, Retention
from server.api.sampling_fields import MAX_TOKENS, TOKEN_ID_SCHEMA, OpenAISampling, TokenId
from server.api.strict_json import StrictModel
from server.document_rules import (
    ABSENT,
    CHAT,
    CHAT_PROMPT,
    COMPLETION,
    FALSE,
    GIVEN,
    either,
    having,
    rules,
    where,
)
from server.structured_output.grammar_spec import ResponseFormat, StructuredOutputs

MAX_TOOLS = 128
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

_NAMED_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED_TOOLS = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _NAMED_TOOL, "minItems": 1},
    },
    "required": ["mode", "tools"],
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        _NAMED_TOOL,
        {
            "type": "object",
            "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED_TOOLS},
            "required": ["type", "allowed_tools"],
        },
        {"type": "null"},
    ]
}

ToolName = Annotated[str, Field(pattern=TOOL_NAME_PATTERN)]
ToolChoice = Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)]  # checked in tools.py, with better messages than a union's
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# The rest of a JSON schema is left to the compiler of grammars
ParametersSchema = WithJsonSchema({"type": "object", "properties": {"type": {"const": "object"}}})
Parameters = Annotated[dict[str, Any], ParametersSchema]


class FunctionDefinition(StrictModel):
    """The definition of a function. `parameters` is a JSON schema; absent means none."""

    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_STOP_STRING_BYTES = 1024
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
MAX_MESSAGES = 8192

Json = Any
Refused = Annotated[Any, WithJsonSchema({"type": "null"})]  # a known field that is not served


def one_of(*values: Json) -> WithJsonSchema:
    """Return the document's schema of a field that only a check behind the schema refuses other values of."""
    return WithJsonSchema({"enum": list(values)})


def text_schema(min_items: int = 1, **kinds: str) -> dict[str, Any]:
    """Return the document's schema of a text, or of parts of these types, each with the key of its text."""
    parts = [
        {"type": "object", "properties": {"type": {"const": kind}, key: {"type": "string"}}, "required": ["type", key]}
        for kind, key in kinds.items()
    ]
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": parts}, "minItems": min_items}]}


_ChatContent = Annotated[
    Any, WithJsonSchema({"anyOf": [*text_schema(text="text", refusal="refusal")["anyOf"], {"type": "null"}]})
]
_BY_ROLE: dict[str, Any] = either(  # what template_messages() asks for
    having(role={"const": "assistant"}),
    having(role={"enum": ["system", "developer", "user"]}, content=GIVEN),
    having(role={"const": "tool"}, content=GIVEN, tool_call_id=GIVEN),
)


def _stop(value: Any) -> list[str]:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise ValueError("must be a string or a list of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(stop)} strings, the limit is {MAX_STOP_STRINGS}")
    for text in stop:
        if not text:
            raise ValueError("must not contain an empty string")
        if len(text.encode()) > MAX_STOP_STRING_BYTES:
            raise ValueError(f"has a string of {len(text.encode())} bytes, the limit is {MAX_STOP_STRING_BYTES}")
    return stop


def check_texts_or_ids(value: Any, *, noun: str, limit: int) -> list[str] | list[list[int]]:
    """Normalise a text, texts, ids or lists of ids to a list of texts or a list of id lists. Raises ValueError.

    noun: name of the items in errors; limit: the most items.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of those lists")
    if _are_ids(value):
        return [value]
    if len(value) > limit:
        raise ValueError(f"has {len(value)} {noun}, the limit is {limit}")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and _are_ids(item) for item in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of those lists, none empty")


def _are_ids(items: list[Any]) -> bool:
    """Return whether there are items, all of them integers and no booleans. In C: a prompt has 100,000."""
    return set(map(type, items)) == {int}


def _prompt(value: Any) -> list[str] | list[list[int]]:
    return check_texts_or_ids(value, noun="prompts", limit=MAX_PROMPTS)


_IDS_SCHEMA = {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}


def texts_or_ids_schema(limit: int) -> dict[str, Any]:
    """Return the document's schema of what check_texts_or_ids() takes."""
    bounds = {"minItems": 1, "maxItems": limit}
    return {
        "anyOf": [
            _TEXT_SCHEMA,
            {"type": "array", "items": _TEXT_SCHEMA, **bounds},
            _IDS_SCHEMA,
            {"type": "array", "items": _IDS_SCHEMA, **bounds},
        ]
    }


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_BYTES}
_STOP_SCHEMA = {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS}]}

Prompt = Annotated[Any, BeforeValidator(_prompt), WithJsonSchema(texts_or_ids_schema(MAX_PROMPTS))]
Stop = Annotated[Any, BeforeValidator(_stop), WithJsonSchema(_STOP_SCHEMA)]
Label = Annotated[str, Field(max_length=512)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=512)]
Name = Annotated[str, Field(min_length=1, max_length=256)]  # of a function, in other APIs than chat


_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)]  # OpenAI's limits


class OtherKind(StrictModel):
    """A tool, or a piece of a conversation, of a type that is not served."""

    type: Label


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis, which is not made


class FunctionCall(StrictModel):
    """The function of a tool call in the history."""

    name: Annotated[str, Field(max_length=256)]
    arguments: str | None = None


class ToolCall(StrictModel):
    """A tool call in the history."""

    id: Label | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(StrictModel):
    """One message of the history."""

    model_config = ConfigDict(json_schema_extra=_BY_ROLE)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _ChatContent = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Json = None
    function_call: Json = None
    annotations: Json = None


class _CommonBody(OpenAISampling):
    """The fields that chat and completions share, beside the sampling parameters."""

    model: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    user: Label | None = None
    # beyond OpenAI, by the names of the field
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # known, refused unless at their default
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None


RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
_KWARGS_SCHEMA = {"type": "object", "propertyNames": {"not": {"enum": sorted(RESERVED_TEMPLATE_KWARGS)}}}
TemplateKwargs = Annotated[dict[str, Json], WithJsonSchema(_KWARGS_SCHEMA)]

_Functions = Annotated[list[dict[str, Json]], Field(min_length=1, max_length=MAX_TOOLS)]


class ChatBody(_CommonBody):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=rules(*CHAT))

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # metadata of the request without effect on the answer
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    # how long the prompt stays in the prefix cache
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    # known, refused unless at their default or, of functions, none may be called
    functions: Annotated[_Functions | None, WithJsonSchema(ABSENT)] = None
    function_call: Annotated[Json, one_of(None, "none", "auto")] = None
    modalities: Annotated[Json, one_of(None, [], ["text"])] = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None


class CompletionBody(_CommonBody):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=rules(*COMPLETION))

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None  # 0: only to score or echo the prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    # known, refused unless at their default
    suffix: Annotated[Json, one_of(None, "")] = None


MAX_DETOKENIZE = 2**20  # ids; a body has room for no more than about twice as many


_TEXT_ONLY = where(add_special_tokens=FALSE, add_special=FALSE)
_TEMPLATE_RULE = where(chat_template_kwargs=either(ABSENT, _KWARGS_SCHEMA))
_ONE_INPUT: dict[str, Any] = {
    "oneOf": [
        {"required": ["prompt"], **where(prompt=GIVEN, content=ABSENT, messages=ABSENT)},
        {"required": ["content"], **where(prompt=ABSENT, content=GIVEN, messages=ABSENT)},
        {
            "required": ["messages"],
            **where(prompt=ABSENT, content=ABSENT, messages=GIVEN),
            **rules(_TEXT_ONLY, _TEMPLATE_RULE, *CHAT_PROMPT),
        },
    ]
}


class TokenizeBody(StrictModel):
    """POST /tokenize: exactly one of prompt, content and messages."""

    model_config = ConfigDict(json_schema_extra=_ONE_INPUT)

    model: Label | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # default true
    return_token_strs: bool | None = None
    # as for a chat completion
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    chat_template_kwargs: dict[str, Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # llama.cpp
    content: str | None = None
    add_special: bool | None = None  # default false
    with_pieces: bool | None = None

    def chat_fields(self) -> dict[str, Json]:
        """Return the fields for a ChatBody."""
        given = {"messages": self.messages, "tools": self.tools, "tool_choice": self.tool_choice}
        given |= {"chat_template_kwargs": self.chat_template_kwargs, "model": self.model}
        given |= {"add_generation_prompt": self.add_generation_prompt}
        given |= {"continue_final_message": self.continue_final_message}
        return {name: value for name, value in given.items() if value is not None}


class DetokenizeBody(StrictModel):
    """POST /detokenize."""

    model: Label | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_DETOKENIZE)]
