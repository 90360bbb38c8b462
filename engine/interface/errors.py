"""ServiceError and its subclasses: every error that Quire reports to a client or an operator. Imports nothing.

Every class has a stable `code` for programs. Every message is one sentence that names the value and the limit.
HTTP statuses are decided only in server/api/error_replies.py; server/errors.py has the errors of HTTP alone.
"""

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from engine.interface.tenant import Rates

ERRORS_BY_CODE: dict[str, "type[ServiceError]"] = {}  # those that a process may send to another


class ServiceError(Exception):
    """Base class of all reported errors. `param`: the request field at fault, if any.

    The class argument `code` of a subclass lists it in ERRORS_BY_CODE.
    """

    code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.code = code
            ERRORS_BY_CODE[code] = cls

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(ServiceError, code="invalid_request"):
    """The request is at fault; sending it again unchanged fails again."""


class InvalidParameter(RequestError, code="invalid_parameter"):
    """A field is missing, has the wrong type, is out of bounds, or contradicts another field."""


class PromptTooLong(RequestError, code="context_length_exceeded"):
    """The prompt, or the prompt and `max_tokens` together, do not fit the context; raised before a stream begins."""


class UnsupportedFeature(RequestError, code="unsupported_feature"):
    """A field is valid, but this build or model does not support it."""


class GrammarError(RequestError, code="invalid_grammar"):
    """A schema, regular expression or grammar does not compile, compiles too slowly, or cannot be followed."""


class Overloaded(ServiceError, code="overloaded"):
    """The queue is full, by requests or by tokens, or the wait for the first token would be too long.

    retry_after_s: when to try again.
    """

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """A limit of the API key is reached, which the message names.

    rates: its limits a minute, if it has some.
    """

    def __init__(self, message: str, *, retry_after_s: int = 1, rates: "Rates | None" = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.rates = rates


class RequestAborted(ServiceError, code="request_aborted"):
    """The request was cancelled (`DELETE /v1/requests/{id}`)."""


class EngineError(ServiceError, code="engine_error"):
    """The engine failed this request, or the metrics did not arrive in time; other requests go on."""


class ModelOutputInvalid(EngineError, code="model_output_invalid"):
    """The model's logits or hidden states for this request are not finite; other requests go on."""


class OutOfMemory(ServiceError, code="out_of_memory"):
    """The device has too little free memory for this request's part of a step; other requests go on."""


class EngineDead(ServiceError, code="engine_dead"):
    """The engine died while it served this request, and no later engine could go on with it (`--max-replays`).

    was_accepted: it had accepted the request, and charged its tenant; was_begun: it had begun to compute it.
    """

    was_accepted = False
    was_begun = False


class PoisonRequest(EngineError, code="poison_request"):
    """Engines died at the same token of this request, at last while it was alone; it is refused for ten minutes."""


class ShuttingDown(ServiceError, code="server_shutting_down"):
    """The daemon shuts down, and the request did not finish within the drain timeout."""


class StartupError(ServiceError, code="startup_failed"):
    """The daemon cannot start. `exit_code`: 2 for wrong usage, 3 for a start that failed."""

    def __init__(self, message: str, *, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def sentence(text: str) -> str:
    """Return another program's message with exactly one final punctuation mark."""
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def phrase_as_sentence(text: str) -> str:
    """Return an error phrase of models or kernels as a sentence, with a capital letter and a full stop."""
    is_word = text.split(" ", 1)[0].isalpha()  # not a path or a flag
    return sentence(text[:1].upper() + text[1:] if is_word else text)


def error_from_code(
    code: str,
    message: str,
    param: str | None = None,
    *,
    retry_after_s: int | None = None,
    rates: "Rates | None" = None,
) -> ServiceError:
    """Rebuild an error that another process sent."""
    error = ERRORS_BY_CODE.get(code, EngineError)(message)
    error.param = param
    if isinstance(error, Overloaded) and retry_after_s is not None:
        error.retry_after_s = retry_after_s
    if isinstance(error, RateLimited):
        error.rates = rates
    return error
