"""Error replies: HTTP status, headers and body of every failure. Only this module decides the status.

The body has OpenAI's form; on the paths of Anthropic's API it has Anthropic's.
"""

import msgspec

from engine.interface.errors import (
    EngineDead,
    EngineError,
    OutOfMemory,
    Overloaded,
    PoisonRequest,
    PromptTooLong,
    RequestAborted,
    RequestError,
    ServiceError,
    ShuttingDown,
)
from server.errors import HttpError

_MAX_MESSAGE_CHARS = 700  # with _MAX_PARAM_CHARS: every error body stays under 4 KB
_MAX_PARAM_CHARS = 100
_DEAD_RETRY_AFTER_S = 2
_ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_ANTHROPIC_TYPES |= {404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error"}
_ANTHROPIC_TYPES |= {413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES |= {431: "invalid_request_error", 503: "overloaded_error"}


class ErrorDetail(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """OpenAI's error body."""

    error: ErrorDetail


class AnthropicDetail(msgspec.Struct):
    """Anthropic's error object."""

    type: str
    message: str


class AnthropicBody(msgspec.Struct, tag_field="type", tag="error"):
    """Anthropic's error body, which is an event of its streams as well."""

    error: AnthropicDetail
    request_id: str


class ErrorReply(msgspec.Struct):
    """A whole HTTP answer for an error."""

    status: int
    body: bytes
    headers: dict[str, str]


def error_status(error: ServiceError) -> int:
    """Return the HTTP status of an error."""
    match error:
        case HttpError():
            return error.status
        case RequestError():
            return 400
        case Overloaded():
            return 429
        case RequestAborted():
            return 409
        case EngineDead() | ShuttingDown() | OutOfMemory():
            return 503
        case _:
            return 500


def public_message(error: ServiceError, *, request_id: str) -> str:
    """Return the message for the client, shortened and cleaned. Internal faults give the request id only."""
    message = error.message
    if error_status(error) == 500 and not isinstance(error, EngineError):
        message = f"The server had an internal error; the request id is {request_id}."
    return _printable(message, _MAX_MESSAGE_CHARS)


def error_body(error: ServiceError, *, request_id: str) -> bytes:
    """Return the JSON of an error in OpenAI's form."""
    param = None if error.param is None else _printable(error.param, _MAX_PARAM_CHARS)
    kind, message = _error_type(error_status(error)), public_message(error, request_id=request_id)
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, error.code)))


def anthropic_body(error: ServiceError, *, request_id: str) -> AnthropicBody:
    """Return an error in Anthropic's form. Clients recognise a prompt that is too long by the message's first words."""
    message = public_message(error, request_id=request_id)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {message}"
    return AnthropicBody(AnthropicDetail(_ANTHROPIC_TYPES.get(error_status(error), "api_error"), message), request_id)


def speaks_anthropic(path: str) -> bool:
    """Return whether the clients of a path expect Anthropic's errors."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_reply(error: ServiceError, *, request_id: str, path: str = "") -> ErrorReply:
    """Return status, body and headers of an error on a path."""
    status = error_status(error)
    headers: dict[str, str] = dict(error.headers) if isinstance(error, HttpError) else {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, EngineDead | ShuttingDown | OutOfMemory):
        headers["retry-after"] = str(_DEAD_RETRY_AFTER_S)
    if (status < 500 and status != 429) or isinstance(error, PoisonRequest):
        headers["x-should-retry"] = "false"  # the openai clients retry 408 and 409 without it
    if speaks_anthropic(path):
        headers["request-id"] = request_id  # the anthropic clients read this name
        return ErrorReply(status, msgspec.json.encode(anthropic_body(error, request_id=request_id)), headers)
    return ErrorReply(status, error_body(error, request_id=request_id), headers)


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _printable(text: str, max_chars: int) -> str:
    """Return the text shortened and cleaned: a message may quote client text, which must not cause an error itself."""
    if len(text) > max_chars:
        text = text[: max_chars - 1] + "…"
    text = text.encode("utf-8", "replace").decode()
    return "".join(char if char >= " " or char == "\n" else " " for char in text)
