"""Errors on their way out: the HTTP status, headers and OpenAI body of every failure. Status is decided only here.

Beside engine/errors.py's tree there are the errors that exist only in HTTP:

    HttpError(ServiceError)
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
    RequestAborted,
    RequestError,
    ServiceError,
    ShuttingDown,
)

_MAX_MESSAGE_CHARS = 700  # with _MAX_PARAM_CHARS: every error body stays under 4 KB
_MAX_PARAM_CHARS = 100
_DEAD_RETRY_AFTER_S = 2


class HttpError(ServiceError):
    """An error of the HTTP side, with its status."""

    status = 400

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to this error."""
        return {}


class NotFound(HttpError):
    """No such route."""

    status = 404
    code = "not_found"


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
        case EngineDead() | ShuttingDown() | RequestAborted() | OutOfMemory():
            return 503
        case _:
            return 500


def error_body(error: ServiceError, *, request_id: str) -> bytes:
    """Return the JSON of an error. Our own faults say no more than the request id."""
    status = error_status(error)
    message = error.message
    if status == 500 and not isinstance(error, EngineError):
        message = f"The server had an internal error; the request id is {request_id}."
    return _body(message, kind=_error_type(status), param=error.param, code=error.code)


def error_reply(error: ServiceError, *, request_id: str) -> ErrorReply:
    """Return status, body and headers of an error."""
    status = error_status(error)
    headers: dict[str, str] = dict(error.headers) if isinstance(error, HttpError) else {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, EngineDead | ShuttingDown | RequestAborted | OutOfMemory):
        headers["retry-after"] = str(_DEAD_RETRY_AFTER_S)
    if status < 500 and status != 429:
        headers["x-should-retry"] = "false"  # read by the openai clients, which else retry 408 and 409
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


def _body(message: str, *, kind: str, param: str | None, code: str) -> bytes:
    param = None if param is None else _printable(param, _MAX_PARAM_CHARS)
    return msgspec.json.encode(ErrorBody(ErrorDetail(_printable(message, _MAX_MESSAGE_CHARS), kind, param, code)))


def _printable(text: str, max_chars: int) -> str:
    """Cut and clean: a message can quote the client, whose text must not become an error of its own."""
    if len(text) > max_chars:
        text = text[: max_chars - 1] + "…"
    text = text.encode("utf-8", "replace").decode()
    return "".join(char if char >= " " or char == "\n" else " " for char in text)
