"""ServerEndpoint: URL and key of the server of a terminal command, with its client, models and error messages.

Also printable() for text from servers and models, without control characters, and handled(), which runs a command's
clean-up on SIGTERM and SIGHUP. Imports httpx. A ServerEndpoint is made from --url and --api-key, or by
server/commands/child_server.py.
"""

import contextlib
import ipaddress
import signal
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import httpx
import msgspec

from engine.interface.errors import StartupError
from server.config.other_scheme import other_scheme

_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)]) | {0x09: "\t", 0x0A: "\n"}
_MAX_ERROR_CHARACTERS = 500
_PROBE_TIMEOUT_S = 5.0
_SPEAKS = {"http": "speaks HTTP without TLS", "https": "speaks TLS"}
Handler = Callable[[int, FrameType | None], object]
_STOPPING = (signal.SIGTERM, signal.SIGHUP)


def printable(text: str) -> str:
    """Return text without control characters but tab and newline: an escape sequence could rewrite the screen."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Return what is printable of a text, with a space for every tab and newline."""
    return printable(text).replace("\t", " ").replace("\n", " ")


class ToolError(StartupError):
    """An error that ends a command. exit_code: 2 wrong usage, 3 no server, or the connection was lost."""


class ServerEndpoint(msgspec.Struct, frozen=True):
    """URL and key of a server. url: without /v1 and without a slash at its end."""

    url: str
    api_key: str | None = None

    def headers(self) -> dict[str, str]:
        """Return what every request carries."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def trusts_proxies(self) -> bool:
        """Return True if the environment's proxy may be used: never for a server on this machine."""
        host = httpx.URL(self.url).host
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host != "localhost"


def make_endpoint(url: str, api_key: str | None, environment: Mapping[str, str]) -> ServerEndpoint:
    """Return the endpoint of the flags; the key may be in QUIRE_API_KEY, of several there the first."""
    from_environment = environment.get("QUIRE_API_KEY", "").split(",")[0].strip()
    key = api_key or from_environment or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ToolError("The API key has characters that no HTTP header can carry.", exit_code=2)
    return ServerEndpoint(url, key)


def make_client(endpoint: ServerEndpoint, *, timeout_s: float | None) -> httpx.Client:
    """Return a blocking client. timeout_s: between bytes of an answer."""
    timeout = httpx.Timeout(timeout_s, connect=_PROBE_TIMEOUT_S)
    return httpx.Client(
        base_url=endpoint.url, headers=endpoint.headers(), timeout=timeout, trust_env=endpoint.trusts_proxies()
    )


def served_models(endpoint: ServerEndpoint) -> list[str] | None:
    """Return the names that a server answers to; None if no server with OpenAI's API answers at all.

    Raises ToolError where one answers and does not let us in.
    """
    try:
        with make_client(endpoint, timeout_s=_PROBE_TIMEOUT_S) as client:
            response = client.get("/v1/models")
    except httpx.HTTPError:
        return None
    check_key(endpoint, response)
    if response.status_code != 200:
        return None
    try:
        return [model.id for model in msgspec.json.decode(response.content, type=_Models).data]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def check_key(endpoint: ServerEndpoint, response: httpx.Response) -> None:
    """Raise ToolError if a server does not accept the key."""
    if response.status_code in (401, 403):
        what = "refuses this API key" if endpoint.api_key else "needs an API key"
        raise ToolError(f"{endpoint.url} {what}: give its key with --api-key or in QUIRE_API_KEY.", exit_code=2)


def error_message(status: int, body: bytes) -> str:
    """Return the message of an error reply, in OpenAI's form or any other, as one printable line."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
        message = error if isinstance(error, str) else error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = " ".join(body[: 4 * _MAX_ERROR_CHARACTERS].decode(errors="replace").split())
        message = f"HTTP {status}: {message}" if message else f"The server replied {status} with an empty body."
    message = one_line(message)
    return message if len(message) <= _MAX_ERROR_CHARACTERS else message[:_MAX_ERROR_CHARACTERS] + "…"


def transport_message(endpoint: ServerEndpoint, error: httpx.HTTPError) -> str:
    """Return the reason for a missing or incomplete reply. May connect once more, to try the other scheme."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return f"The TLS certificate of {endpoint.url} is not trusted: {error}."
    if not isinstance(error, httpx.TimeoutException) and (other := other_scheme(endpoint.url)) is not None:
        return f"The server at {endpoint.url} {_SPEAKS[other.partition(':')[0]]}: its URL is {other}."
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"No server answers at {endpoint.url}."
    if isinstance(error, httpx.TimeoutException):
        return f"{endpoint.url} did not reply in time."
    return f"The connection to {endpoint.url} was lost: {str(error) or type(error).__name__}."


def nobody_message(endpoint: ServerEndpoint, hint: str) -> str:
    """Return the sentence on an address where served_models() found nobody. hint: what to do, without a full stop."""
    if (other := other_scheme(endpoint.url)) is not None:
        hint = f"the server there {_SPEAKS[other.partition(':')[0]]}, so its URL is {other}"
    return f"No server with OpenAI's API answers at {endpoint.url}: {hint}."


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that end a command. Signals that are ignored, as under nohup, stay ignored."""
    return [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Install a handler for SIGTERM and SIGHUP, which raises the exception that ends the command."""
    numbers = stopping_signals()
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            if signal.getsignal(number) == handler:  # else the process is leaving
                signal.signal(number, old)


def leave(number: int, _: FrameType | None) -> None:
    """Raise SystemExit with the exit code of a signal, and ignore further signals, so that clean-ups are complete."""
    for other in _STOPPING:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _ErrorDetail(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail | str
