"""The one error tree of the daemon. Imports nothing.

    ServiceError                      anything Quire reports to a person or a client
    ├── RequestError                  the request is at fault; it alone ends
    │   ├── InvalidParameter          a field's value is outside its limits
    │   ├── PromptTooLong             prompt + asked-for tokens exceed the context
    │   ├── UnsupportedFeature        understood, but not served by this build or model
    │   └── GrammarError              a grammar, schema or regex does not compile
    ├── Overloaded                    the queue is full; try again later
    ├── RequestAborted                ended by its client or by an operator
    ├── EngineError                   the engine failed this request
    ├── OutOfMemory                   the device had no room for this request's part of a step
    ├── EngineDead                    the engine process is gone; it is being restarted
    ├── ShuttingDown                  the daemon is ending, and with it whatever is still open
    └── StartupError                  the daemon cannot start (bad folder, no memory, port in use, ...)

Every class has a stable `code` for programs; every message is one sentence that names the value and the limit.
HTTP statuses are decided only in server/error_replies.py.
"""


class ServiceError(Exception):
    """Anything that is reported to a client. `param` names the field at fault, if one is."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(ServiceError):
    """The request is at fault; sending it again unchanged fails again."""

    code = "invalid_request"


class InvalidParameter(RequestError):
    """A field's value is outside its limits."""

    code = "invalid_parameter"


class PromptTooLong(RequestError):
    """The prompt, or the prompt and the tokens asked for, do not fit the context."""

    code = "context_length_exceeded"


class UnsupportedFeature(RequestError):
    """A field is understood but not served by this build or model."""

    code = "unsupported_feature"


class GrammarError(RequestError):
    """A grammar, schema or regex does not compile."""

    code = "invalid_grammar"


class Overloaded(ServiceError):
    """The queue is full. `retry_after_s` is a hint for the client."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAborted(ServiceError):
    """The request was ended by its client or by an operator."""

    code = "request_aborted"


class EngineError(ServiceError):
    """The engine failed this request; others are not affected."""

    code = "engine_error"


class OutOfMemory(ServiceError):
    """A step did not fit the device's memory. The requests blamed for its size fail; the others go on."""

    code = "out_of_memory"


class EngineDead(ServiceError):
    """The engine process ended; the launcher restarts it."""

    code = "engine_dead"


class ShuttingDown(ServiceError):
    """The daemon ended before the request did."""

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
    """Return another program's words as the end of a sentence of ours: with one full stop, or their own mark."""
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def error_from_code(code: str, message: str, param: str | None = None) -> ServiceError:
    """Rebuild the error that crossed a process border as (code, message, param)."""
    error = ERRORS_BY_CODE.get(code, EngineError)(message)
    error.param = param
    return error
