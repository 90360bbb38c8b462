"""HTTP-only errors, in addition to the tree of engine/interface/errors.py. server/api/error_replies.py makes replies
of both.

HttpError(ServiceError)
├── MissingKey            no API key, or an unknown one
├── MissingRole           the API key lacks a role
├── ForeignHost           Host or Origin is none of the server's
├── RequestNotFound       no such running request
├── NotFound · ModelNotFound · MethodNotAllowed
├── MalformedHttp · HeadersTooLarge · SlowClient
├── BodyTooLarge · UnsupportedMediaType · MalformedBody
├── DeadlineExceeded      the request's own time is over
├── NotReady · Draining   the daemon takes no requests now
├── TooManyConnections    no file descriptors for more
├── TooManyBodies         no memory for more large bodies at once
└── ClientGone            the client closed the connection
"""

from collections.abc import Mapping

from engine.interface.errors import ServiceError


class HttpError(ServiceError):
    """An error of the HTTP side, with its status."""

    status = 400
    headers: Mapping[str, str] = {}  # of the reply


class MissingKey(HttpError):
    """The server has API keys, and the request brings none of them."""

    status = 401
    code = "invalid_api_key"
    headers: Mapping[str, str] = {"www-authenticate": "Bearer"}  # required by RFC 9110, §15.5.2


class MissingRole(HttpError):
    """The API key is valid, and has not the role that the route needs."""

    status = 403
    code = "missing_role"


class ForeignHost(HttpError):
    """The server has no API keys, and the request's Host or Origin is neither a loopback name nor an allowed one."""

    status = 403
    code = "foreign_host"


class NotFound(HttpError):
    """There is no such route."""

    status = 404
    code = "not_found"


class RequestNotFound(HttpError):
    """No such request is running."""

    status = 404
    code = "request_not_found"


class ModelNotFound(HttpError):
    """The server does not serve this model."""

    status = 404
    code = "model_not_found"


class MethodNotAllowed(HttpError):
    """The route does not take this method."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.headers = {"allow": allow}  # required by RFC 9110, §15.5.6


class MalformedHttp(HttpError):
    """The bytes are not HTTP/1.1; the connection closes."""

    status = 400
    code = "malformed_http"


class HeadersTooLarge(HttpError):
    """The headers exceed a limit (RFC 6585, §5); the connection closes."""

    status = 431
    code = "headers_too_large"


class SlowClient(HttpError):
    """The request did not arrive in time (RFC 9110, §15.5.9); the connection closes."""

    status = 408
    code = "slow_client"


class BodyTooLarge(HttpError):
    """The body exceeds the limit; the server does not read the rest, and the connection closes."""

    status = 413
    code = "body_too_large"
    headers: Mapping[str, str] = {"connection": "close"}  # the unread rest makes the connection useless


class UnsupportedMediaType(HttpError):
    """The content type is not JSON, or the body is compressed."""

    status = 415
    code = "unsupported_media_type"


class MalformedBody(HttpError):
    """The body is not a JSON object, is nested too deeply, or contains a lone surrogate."""

    status = 400
    code = "malformed_json"


class DeadlineExceeded(HttpError):
    """The request took longer than its `timeout` or `--request-timeout`."""

    status = 408
    code = "deadline_exceeded"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request took longer than its limit of {timeout_s:g} s.")


class NotReady(HttpError):
    """The model loads, or the engine restarts."""

    status = 503
    code = "not_ready"
    headers: Mapping[str, str] = {"retry-after": "2"}  # a start takes seconds


class Draining(HttpError):
    """The daemon shuts down and takes no new requests."""

    status = 503
    code = "draining"
    headers: Mapping[str, str] = {"retry-after": "5"}  # another replica, or this one after its restart, may serve it


class TooManyConnections(HttpError):
    """An HTTP worker has no file descriptors for more connections; the connection closes."""

    status = 503
    code = "too_many_connections"
    headers: Mapping[str, str] = {"retry-after": "1"}  # another worker, or this one a moment later, may serve it


class TooManyBodies(HttpError):
    """The large bodies that an HTTP worker reads at once exceed their limit together; the connection closes."""

    status = 503
    code = "too_many_bodies"
    headers: Mapping[str, str] = {"retry-after": "1", "connection": "close"}  # the unread rest, as in BodyTooLarge


class ClientGone(HttpError):
    """The client left before its answer was complete; the status appears in the log only."""

    status = 499
    code = "client_gone"
