"""The costliest bodies of each route: accepted, or refused only after their work. For the tests of costs."""

import json
from typing import Any, NamedTuple

import msgspec

from engine.interface.config import ServerConfig
from server.api.limits import LIMITS
from server.api.messages.schema import MAX_BLOCKS
from server.api.schemas import MAX_CHOICES, MAX_DETOKENIZE, MAX_LOGPROBS, MAX_MESSAGES

MODEL = "quire-demo"  # the name in bodies that need one
CONTEXT = 4096  # of the model that they are for

_NUM_PARTS = 7  # of a message: all of them together have nearly the most strings
_FILL = "u" * (3 * 2**20)  # of a field without effect

_IDS = [5] * (LIMITS.prompt_tokens // 1024 - 1) + [2**31 - 1]  # the last is in no vocabulary
_PARTS = [{"type": "text", "text": "a"}] * _NUM_PARTS
_MESSAGES = [{"role": "user", "content": _PARTS}] * (MAX_MESSAGES - 1)
_CHAT = {"messages": _MESSAGES, "unknown": _FILL}
_BLOCKS = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * (MAX_BLOCKS - 1)
_COUNT = {"model": MODEL, "messages": [{"role": "user", "content": _BLOCKS}], "unknown": _FILL}
_COMPLETION = {"prompt": [[5] * 1024] * 1023 + [_IDS], "max_tokens": 1}
_TOKENIZE = {"prompt": "quire " * (LIMITS.counted_tokens // 3), "with_pieces": True, "return_token_strs": True}
_INPUT = [{"type": "input_text", "text": "a"}] * _NUM_PARTS

_ASK = {"messages": [{"role": "user", "content": "a"}]}
_NUM_SCORED = LIMITS.answer_entries // (MAX_CHOICES * (MAX_LOGPROBS + 1))  # tokens of each of the most choices
_SCORED = {"n": MAX_CHOICES, "max_tokens": _NUM_SCORED, "ignore_eos": True}
_NUM_PROMPTS = LIMITS.answer_entries // ((CONTEXT - 1) * (MAX_LOGPROBS + 1))
_SCORED_PROMPTS = {"prompt": [[5] * (CONTEXT - 1)] * _NUM_PROMPTS, "echo": True, "logprobs": MAX_LOGPROBS}
# As long as a schema may be, each automaton nearly the largest; the compiler gives up at its deadline
_MULTIPLES = {f"field{i:05}": {"type": "integer", "multipleOf": 9_999 - i % 30} for i in range(2200)}
_SCHEMA = {"type": "object", "properties": _MULTIPLES, "additionalProperties": False}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}


class CostlyBody(NamedTuple):
    """A body, and the code of the error that it ends in; "": it is answered.

    num_at_once: so many are sent together; the tests' model takes minutes to generate more.
    """

    path: str
    fields: dict[str, Any]
    error: str = ""
    num_at_once: int = 8

    @property
    def content(self) -> bytes:
        """Its JSON."""
        return json.dumps(self.fields).encode()


_TOO_LONG, _INVALID, _TOO_SLOW = "context_length_exceeded", "invalid_parameter", "invalid_grammar"

COSTLY_BODIES = {
    "chat": CostlyBody("/v1/chat/completions", _CHAT, _TOO_LONG),
    "chat, log-probabilities": CostlyBody(
        "/v1/chat/completions", {**_ASK, **_SCORED, "logprobs": True, "top_logprobs": MAX_LOGPROBS}, num_at_once=1
    ),
    "chat, multiples": CostlyBody("/v1/chat/completions", {**_ASK, "response_format": _FORMAT}, _TOO_SLOW),
    "completions": CostlyBody("/v1/completions", _COMPLETION, _INVALID),
    "completions, log-probabilities": CostlyBody(
        "/v1/completions", {"prompt": "a", **_SCORED, "logprobs": MAX_LOGPROBS}, num_at_once=1
    ),
    "completions, log-probabilities of prompts": CostlyBody(
        "/v1/completions", {**_SCORED_PROMPTS, "max_tokens": 0}, num_at_once=1
    ),
    "completions, multiples": CostlyBody("/v1/completions", {"prompt": "a", "response_format": _FORMAT}, _TOO_SLOW),
    "responses": CostlyBody(
        "/v1/responses",
        {"input": [{"role": "user", "content": _INPUT}] * (MAX_MESSAGES - 1), "unknown": _FILL},
        _TOO_LONG,
    ),
    "responses, log-probabilities": CostlyBody(
        "/v1/responses", {"input": "a", "top_logprobs": MAX_LOGPROBS, "max_output_tokens": CONTEXT // 2}, num_at_once=1
    ),
    "input_tokens": CostlyBody(
        "/v1/responses/input_tokens",
        {"input": [{"role": "user", "content": _INPUT}] * (MAX_MESSAGES - 1), "unknown": _FILL},
        _TOO_LONG,
    ),
    "messages": CostlyBody("/v1/messages", {**_COUNT, "max_tokens": 1}, "invalid_request_error"),
    "count_tokens": CostlyBody("/v1/messages/count_tokens", _COUNT, "invalid_request_error"),
    "embeddings": CostlyBody("/v1/embeddings", {"input": [[5] * 1024] * 1023 + [_IDS]}, _INVALID),
    "tokenize": CostlyBody("/tokenize", _TOKENIZE),
    "detokenize": CostlyBody("/detokenize", {"tokens": [5] * MAX_DETOKENIZE}),
    "chat render": CostlyBody("/v1/chat/completions/render", _CHAT, _TOO_LONG),
    "completions render": CostlyBody("/v1/completions/render", _COMPLETION, _INVALID),
}


def max_body_bytes() -> int:
    """Return the limit of one body."""
    return {field.name: field.default for field in msgspec.structs.fields(ServerConfig)}["max_body_bytes"]
