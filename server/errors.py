"""Errors on their way out: the HTTP status, headers and body of every failure. Status is decided only here.

The body is OpenAI's; on the paths of Anthropic's API it is Anthropic's.

Beside engine/errors.py's tree there are the errors that exist only in HTTP:

    HttpError(ServiceError)
    ├── MissingKey            no API key, or an unknown one
    ├── RequestNotFound       no such running request
    ├── NotFound · ModelNotFound · MethodNotAllowed
    ├── MalformedHttp · HeadersTooLarge · SlowClient
    ├── BodyTooLarge · UnsupportedMediaType · MalformedBody
    ├── DeadlineExceeded      the request's own time is over
    ├── NotReady · Draining   the daemon takes no work now
    └── ClientGone            nobody reads the answer any more
"""

from collections.abc import Mapping

import msgspec

from engine.errors import (
    EngineDead,
    EngineError,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    RequestAborted,
    RequestError,
    ServiceError,
    ShuttingDown,
)

_MAX_MESSAGE_CHARS = 700  # with _MAX_PARAM_CHARS: every error body stays under 4 KB
_MAX_PARAM_CHARS = 100
_DEAD_RETRY_AFTER_S = 2
_ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_ANTHROPIC_TYPES |= {404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error"}
_ANTHROPIC_TYPES |= {413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES |= {431: "invalid_request_error", 503: "overloaded_error"}


class HttpError(ServiceError):
    """An error of the HTTP side, with its status."""

    status = 400

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to this error."""
        return {}


class MissingKey(HttpError):
    """No API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        """RFC 9110, §15.5.2: WWW-Authenticate is required."""
        return {"www-authenticate": "Bearer"}


class NotFound(HttpError):
    """No such route."""

    status = 404
    code = "not_found"


class RequestNotFound(HttpError):
    """No such request is running here."""

    status = 404
    code = "request_not_found"


class ModelNotFound(HttpError):
    """The model asked for is not served here."""

    status = 404
    code = "model_not_found"


class MethodNotAllowed(HttpError):
    """The route exists, the method does not."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self._allow = allow

    @property
    def headers(self) -> dict[str, str]:
        """RFC 9110, §15.5.6: Allow is required."""
        return {"allow": self._allow}


class MalformedHttp(HttpError):
    """The bytes are not HTTP."""

    status = 400
    code = "malformed_http"


class HeadersTooLarge(HttpError):
    """The headers are over the limit (RFC 6585, §5)."""

    status = 431
    code = "headers_too_large"


class SlowClient(HttpError):
    """A request that has begun does not come to its end (RFC 9110, §15.5.9)."""

    status = 408
    code = "slow_client"


class BodyTooLarge(HttpError):
    """The body is over the limit; the rest of it is not read."""

    status = 413
    code = "body_too_large"

    @property
    def headers(self) -> dict[str, str]:
        """The unread rest makes the connection useless."""
        return {"connection": "close"}


class UnsupportedMediaType(HttpError):
    """The body is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class MalformedBody(HttpError):
    """The body is not a JSON object within the limits."""

    status = 400
    code = "malformed_json"


class DeadlineExceeded(HttpError):
    """The request's time is over."""

    status = 408
    code = "deadline_exceeded"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request took longer than its limit of {timeout_s:g} s.")


class NotReady(HttpError):
    """The model is not serving yet."""

    status = 503
    code = "not_ready"

    @property
    def headers(self) -> dict[str, str]:
        """A start takes seconds."""
        return {"retry-after": "2"}


class Draining(HttpError):
    """The daemon is stopping."""

    status = 503
    code = "draining"

    @property
    def headers(self) -> dict[str, str]:
        """Another replica, or this one after its restart, takes the next try."""
        return {"retry-after": "5"}


class ClientGone(HttpError):
    """The client left before its answer was complete; the status is for the log only."""

    status = 499
    code = "client_gone"


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
    """Return what a client may hear, cut and cleaned. Our own faults say no more than the request id."""
    message = error.message
    if error_status(error) == 500 and not isinstance(error, EngineError):
        message = f"The server had an internal error; the request id is {request_id}."
    return _printable(message, _MAX_MESSAGE_CHARS)


def error_body(error: ServiceError, *, request_id: str) -> bytes:
    """Return the JSON of an error, as OpenAI has it."""
    param = None if error.param is None else _printable(error.param, _MAX_PARAM_CHARS)
    kind, message = _error_type(error_status(error)), public_message(error, request_id=request_id)
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, param, error.code)))


def anthropic_body(error: ServiceError, *, request_id: str) -> AnthropicBody:
    """Return an error as Anthropic has it. Clients know a prompt that does not fit by the words it begins with."""
    message = public_message(error, request_id=request_id)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {message}"
    return AnthropicBody(AnthropicDetail(_ANTHROPIC_TYPES.get(error_status(error), "api_error"), message), request_id)


def speaks_anthropic(path: str) -> bool:
    """Tell whether the clients of a path expect Anthropic's errors."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_reply(error: ServiceError, *, request_id: str, path: str = "") -> ErrorReply:
    """Return status, body and headers of an error on a path."""
    status = error_status(error)
    headers: dict[str, str] = dict(error.headers) if isinstance(error, HttpError) else {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, EngineDead | ShuttingDown | OutOfMemory):
        headers["retry-after"] = str(_DEAD_RETRY_AFTER_S)
    if status < 500 and status != 429:
        headers["x-should-retry"] = "false"  # read by the openai clients, which else retry 408 and 409
    if speaks_anthropic(path):
        headers["request-id"] = request_id  # what the anthropic clients read
        return ErrorReply(status, msgspec.json.encode(anthropic_body(error, request_id=request_id)), headers)
    return ErrorReply(status, error_body(error, request_id=request_id), headers)


def error_from_http(status: int, *, path: str, method: str, headers: Mapping[str, str] | None) -> ServiceError:
    """Rebuild an error that Starlette's router raised as a bare status."""
    if status == 404:
        return NotFound(f"There is no route {path[:200]}.")
    if status == 405:
        allow = (headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{path[:200]} does not accept {method[:16]}; it accepts {allow}.", allow=allow)
    if status < 500:
        return MalformedBody("The request could not be read.")
    return ServiceError("internal error")


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _printable(text: str, max_chars: int) -> str:
    """Cut and clean: a message can quote the client, whose text must not become an error of its own."""
    if len(text) > max_chars:
        text = text[: max_chars - 1] + "…"
    text = text.encode("utf-8", "replace").decode()
    return "".join(char if char >= " " or char == "\n" else " " for char in text)
