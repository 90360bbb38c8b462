"""KeyGuard: refuses requests without an API key, except for public routes. Pure ASGI. Imports starlette, server.
HostGuard: without keys, refuses what a browser sends for pages of other hosts. Both log what they refuse.

Every path that is not public needs a key, unknown paths and methods too, so that replies do not reveal which routes
exist. A request is public if it matches a route of the public router by Starlette's own matching; that router comes
first in the app, so the same route then replies.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.error_replies import error_reply
from server.api.request_record import path_of, record_of
from server.config.api_keys import KeyRing
from server.config.host_names import host_of, is_loopback
from server.errors import ForeignHost, HttpError, MissingKey, MissingRole

logger = logging.getLogger(__name__)
_LOG_INTERVAL_S = 1.0


class RefusalLog:
    """Logs refused requests, one in a second at most, so that guesses do not fill the disk, and no key material."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = 0.0
        self._num_unlogged = 0

    def refuse(self, scope: Scope, error: HttpError) -> None:
        """Log a refusal with the client's address, which is a proxy's if there is one, and the route."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_unlogged += 1
            return
        client = scope.get("client")  # none over a unix socket
        # The path is the client's own text: nothing but printable ASCII may reach a log line
        path = "".join(char if "!" <= char <= "~" else "?" for char in scope["path"][:100])
        logger.warning(
            "access refused code=%s client=%s method=%s path=%s not_logged_before=%d",
            error.code,
            client[0] if client else "-",
            scope["method"][:16],
            path,
            self._num_unlogged,
        )
        self._next_s, self._num_unlogged = now_s + _LOG_INTERVAL_S, 0


class _Gate:
    """Passes requests on to the app, or logs and refuses them. on_refusal: told of refused POSTs."""

    def __init__(self, app: ASGIApp, on_refusal: Callable[[HttpError], None]) -> None:
        self._app = app
        self._log = RefusalLog()
        self._on_refusal = on_refusal

    async def take(
        self, scope: Scope, receive: Receive, send: Send, *, refusal: Callable[[Scope], HttpError | None]
    ) -> None:
        """Pass a request on, or reply with its error, if `refusal` returns one; then the body is not read."""
        error = refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._log.refuse(scope, error)
        record = record_of(scope)
        record.outcome = error.code
        if scope["method"] == "POST":
            self._on_refusal(error)
        reply = error_reply(error, request_id=record.request_id, path=path_of(scope))
        headers = {"content-type": "application/json", "content-length": str(len(reply.body)), **reply.headers}
        lines = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": lines})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else reply.body})


class KeyGuard:
    """Middleware inside AccessLog; it stores the hash of the request's key in AccessLog's record."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        public: list[BaseRoute],
        routes_of: Mapping[str, list[BaseRoute]] | None = None,
        on_refusal: Callable[[HttpError], None],
    ) -> None:
        """routes_of: by the role that a key needs for them."""
        self._gate = _Gate(app, on_refusal)
        self._routes_of = routes_of or {}
        self._keys = keys
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reply 401, or 403 to a key without the route's role."""
        await self._gate.take(scope, receive, send, refusal=self._refusal)

    def _refusal(self, scope: Scope) -> HttpError | None:
        presented = _presented(scope)
        key_hash = next(filter(None, map(self._keys.find, presented)), None)
        record = record_of(scope)
        if key_hash is not None:
            record.key_hash, record.key_roles = key_hash, self._keys.roles_of(key_hash)
            record.tenant = self._keys.tenant_of(key_hash)
        if _matches(self._public, scope):
            return None
        if key_hash is None and presented:
            return MissingKey("The API key of this request is not one of this server's.")
        if key_hash is None:
            return MissingKey(
                "This server needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        for role, routes in self._routes_of.items():
            if role not in record.key_roles and _matches(routes, scope):
                return MissingRole(f"This route needs an API key with the role {role}, which this key has not.")
        return None


class HostGuard:
    """Middleware inside AccessLog, for a server without API keys: DNS rebinding must not open it to web pages.

    Host, and Origin where there is one, must be a loopback name or one of `hosts`; Origin may be one of `origins`.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Sequence[str], origins: Sequence[str], on_refusal: Callable[[HttpError], None]
    ) -> None:
        self._gate = _Gate(app, on_refusal)
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reply 403."""
        await self._gate.take(scope, receive, send, refusal=self._refusal)

    def _refusal(self, scope: Scope) -> ForeignHost | None:
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            if name == b"host" and not self._is_known(host_of(text)):
                return ForeignHost(
                    f"The Host {text[:100]!r} is neither a loopback name nor one of --allowed-host, and this server has"
                    " no API key."
                )
            is_allowed = "*" in self._origins or text in self._origins
            if name == b"origin" and not is_allowed and not self._is_known(host_of(text.partition("://")[2])):
                return ForeignHost(
                    f"The Origin {text[:100]!r} is neither a loopback one nor of --allowed-host or --cors-origin, and"
                    " this server has no API key."
                )
        return None

    def _is_known(self, host: str) -> bool:
        return is_loopback(host) or host in self._hosts


def _matches(routes: list[BaseRoute], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


def _presented(scope: Scope) -> list[str]:
    """Return the keys of a request: `Authorization: Bearer KEY`, `x-api-key: KEY`."""
    keys = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(credentials.strip().decode("latin-1"))
        elif name == b"x-api-key":
            keys.append(value.strip().decode("latin-1"))
    return keys
