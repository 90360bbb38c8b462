"""Objects of the answers in JSON, as msgspec structs, which encode fast. Field order is OpenAI's. Imports msgspec.

UNSET leaves a key out; None writes null.
"""

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from engine.interface.kv_snapshot import CacheReason, LayerKind
from server.generation.spec import Stats


class PromptTokensDetails(msgspec.Struct):
    """Part of Usage."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Part of Usage."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(msgspec.Struct):
    """Durations in milliseconds; null for a phase that did not occur. itl_ms: mean time between tokens.

    replays: how often the answer went on with another engine, since one had ended; left out if never.
    """

    queue_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    itl_ms: float | None
    total_ms: float
    replays: int | UnsetType = UNSET


class CacheFacts(msgspec.Struct):
    """What the prefix cache had of the first prompt, and why it had no more.

    matched_tokens: those that layers with full attention had; kind: the layers that had no more.
    host_tokens: those of cached_tokens whose blocks came from host memory, if there are any. disk_tokens: those
    of host_tokens whose blocks were read from disk, if there are any.
    """

    reason: CacheReason
    cached_tokens: int
    matched_tokens: int
    kind: LayerKind | None
    host_tokens: int | UnsetType = UNSET
    disk_tokens: int | UnsetType = UNSET


class TopLogprob(msgspec.Struct, gc=False):
    """One alternative at a token's place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """One generated token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """A chat choice's log-probabilities."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """A completion choice's log-probabilities."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionDelta(msgspec.Struct):
    """The name comes once, with empty arguments; then arguments alone."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """A call's first delta has id, type and name; the later ones have index and arguments alone."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, gc=False):
    """vLLM's entry for one token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ChatDelta(msgspec.Struct):
    """The part of the message in one chunk. Clients read reasoning under either of its two names."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    cache: CacheFacts | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CalledFunction(msgspec.Struct):
    """`arguments` is JSON unless the model wrote it wrong or was cut off."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """One whole tool call."""

    id: str
    type: str = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """The whole message. content: null where there are tool calls and no text."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One whole choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    cache: CacheFacts | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """One choice of a completion, or its part of a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole completion, or one event of its stream: OpenAI gives both the same form."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    cache: CacheFacts | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """One served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str  # the model's first name
    parent: str | None  # the model that an adapter belongs to
    max_model_len: int | None


class ModelList(msgspec.Struct, kw_only=True):
    """The served models."""

    object: str = "list"
    data: list[ModelCard]


class TokenPiece(msgspec.Struct):
    """llama.cpp's form of a token: its text, or its bytes where it is part of a character."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, kw_only=True):
    """The answer of /tokenize. token_strs: the vocabulary's own spellings, if asked for."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


class AddedToken(msgspec.Struct):
    """Part of TokenizerInfo: a token beside the tokenizer's own vocabulary."""

    content: str
    special: bool


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The answer of /tokenizer_info: what tokenizer_config.json says of the text, and no paths."""

    tokenizer_class: str
    model_max_length: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    chat_template: str | None = None
    added_tokens_decoder: dict[str, AddedToken] = {}


class Rendered(msgspec.Struct, kw_only=True):
    """One prompt of a render route; request_id: the id that the answer would have."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str


class CancelledRequest(msgspec.Struct):
    """The answer of DELETE /v1/requests/{id}."""

    id: str
    cancelled: bool = True


def usage_of(stats: Stats) -> Usage:
    """Return OpenAI's usage object."""
    return Usage(
        prompt_tokens=stats.num_prompt_tokens,
        completion_tokens=stats.num_output_tokens,
        total_tokens=stats.num_prompt_tokens + stats.num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(stats.num_cached_tokens),
        completion_tokens_details=CompletionTokensDetails(stats.num_reasoning_tokens),
    )


def timings_of(stats: Stats) -> Timings:
    """Return the timings object."""
    return Timings(
        queue_ms=_ms(stats.queue_s),
        prefill_ms=_ms(stats.prefill_s),
        ttft_ms=_ms(stats.ttft_s),
        itl_ms=_ms(stats.itl_s),
        total_ms=round(stats.total_s * 1000, 3),
        replays=stats.num_replays or UNSET,
    )


def cache_of(stats: Stats) -> CacheFacts | UnsetType:
    """Return the cache object; none before the first token."""
    if stats.cache is None:
        return UNSET
    report = stats.cache
    facts = CacheFacts(report.reason, report.num_cached_tokens, report.num_matched_tokens, report.kind)
    if report.num_host_tokens:
        facts.host_tokens = report.num_host_tokens
    if report.num_disk_tokens:
        facts.disk_tokens = report.num_disk_tokens
    return facts


def cache_header(stats: Stats) -> Mapping[str, str]:
    """Return the same as a header, an item of structured fields (RFC 9651); none before the first token."""
    report = stats.cache
    if report is None:
        return {}
    kind = f";kind={report.kind}" if report.kind is not None else ""
    host = f";host={report.num_host_tokens}" if report.num_host_tokens else ""
    disk = f";disk={report.num_disk_tokens}" if report.num_disk_tokens else ""
    value = f"{report.reason};cached={report.num_cached_tokens};matched={report.num_matched_tokens}{kind}{host}{disk}"
    return {"x-quire-cache": value}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
