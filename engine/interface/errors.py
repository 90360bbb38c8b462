"""ServiceError and its subclasses: every error that Quire reports to a client or an operator. Imports nothing.

    ServiceError                      base class
    ├── RequestError                  the request is at fault; only this request ends
    │   ├── InvalidParameter          a field's value is outside its limits
    │   ├── PromptTooLong             prompt and requested tokens exceed the context
    │   ├── UnsupportedFeature        valid, but not supported by this build or model
    │   └── GrammarError              a grammar, schema or regex does not compile
    ├── Overloaded                    the queue is full; try again later
    ├── RequestAborted                cancelled by its client or by an operator
    ├── EngineError                   the engine failed this request
    ├── OutOfMemory                   the device had too little memory for this request's part of a step
    ├── EngineDead                    the engine process died; the launcher restarts it
    ├── ShuttingDown                  the daemon is shutting down and ends all open requests
    └── StartupError                  the daemon cannot start (bad folder, no memory, port in use, ...)

Every class has a stable `code` for programs. Every message is one sentence that names the value and the limit.
HTTP statuses are decided only in server/api/error_replies.py.
"""


class ServiceError(Exception):
    """Base class of all reported errors. `param`: the request field at fault, if any."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(ServiceError):
    """The request is at fault; sending it again unchanged fails again."""

    code = "invalid_request"


class InvalidParameter(RequestError):
    """A field is missing, has the wrong type, is out of bounds, or contradicts another field."""

    code = "invalid_parameter"


class PromptTooLong(RequestError):
    """The prompt, or the prompt and `max_tokens` together, do not fit the context; raised before a stream begins."""

    code = "context_length_exceeded"


class UnsupportedFeature(RequestError):
    """A field is valid, but this build or model does not support it."""

    code = "unsupported_feature"


class GrammarError(RequestError):
    """A schema, regular expression or grammar does not compile, compiles too slowly, or cannot be followed."""

    code = "invalid_grammar"


class Overloaded(ServiceError):
    """The queue is full, by requests or by tokens.

    retry_after_s: a hint for the client.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAborted(ServiceError):
    """The request was cancelled (`DELETE /v1/requests/{id}`)."""

    code = "request_aborted"


class EngineError(ServiceError):
    """The engine failed this request, or the metrics did not arrive in time; other requests go on."""

    code = "engine_error"


class OutOfMemory(ServiceError):
    """The device has too little free memory for this request's part of a step; other requests go on."""

    code = "out_of_memory"


class EngineDead(ServiceError):
    """The engine died while it served this request; the launcher restarts it."""

    code = "engine_dead"


class ShuttingDown(ServiceError):
    """The daemon shuts down, and the request did not finish within the drain timeout."""

    code = "server_shutting_down"


class StartupError(ServiceError):
    """The daemon cannot start. `exit_code`: 2 for wrong usage, 3 for a start that failed."""

    code = "startup_failed"

    def __init__(self, message: str, *, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code


ERRORS_BY_CODE: dict[str, type[ServiceError]] = {
    cls.code: cls
    for cls in (
        RequestError,
        InvalidParameter,
        PromptTooLong,
        UnsupportedFeature,
        GrammarError,
        Overloaded,
        RequestAborted,
        EngineError,
        OutOfMemory,
        EngineDead,
        ShuttingDown,
        StartupError,
    )
}


def sentence(text: str) -> str:
    """Return another program's message with exactly one final punctuation mark."""
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def error_from_code(code: str, message: str, param: str | None = None) -> ServiceError:
    """Rebuild an error that another process sent as (code, message, param)."""
    error = ERRORS_BY_CODE.get(code, EngineError)(message)
    error.param = param
    return error
