"""RouteGuide: the errors of requests that no route takes. A 404 names the route that was probably meant, since most of
these requests come from a wrong base URL; a 405 has all methods of its path. Imports starlette, server.
"""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from engine.interface.errors import ServiceError
from server.config.known_words import about_route
from server.errors import MalformedBody, MethodNotAllowed, NotFound

_MAX_SHOWN_CHARS = 200
_MAX_SEGMENTS = 8
_API = "/v1"
_SIMILARITY = 0.8  # of two paths: one letter more or less is above it
# Paths of other servers and of older APIs, from the last segments on
_OTHER_NAMES = {
    "chat": "/v1/chat/completions",
    "chat/completion": "/v1/chat/completions",
    "generate": "/v1/completions",
    "completion": "/v1/completions",
    "complete": "/v1/completions",
    "embed": "/v1/embeddings",
    "embedding": "/v1/embeddings",
    "tags": "/v1/models",
    "model": "/v1/models",
    "message": "/v1/messages",
    "response": "/v1/responses",
    "livez": "/health",
    "healthz": "/health",
    "readyz": "/ready",
}


class RouteGuide:
    """All routes of the app, asked about requests that none of them took."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._literal = [route.path for route in self._routes if "{" not in route.path]

    def error(self, status: int, scope: Scope) -> ServiceError:
        """Return the error for a bare status of Starlette's router."""
        path = scope["path"][:_MAX_SHOWN_CHARS]
        if status == 404:
            known = about_route(path)
            if known is not None:
                return NotFound(f"There is no route {path}: {known}.")
            right = self._right_path(scope)
            return NotFound(f"There is no route {path}" + (f": it is {right} on this server." if right else "."))
        if status == 405:
            allow = ", ".join(sorted(self._methods(scope)))
            method = scope["method"][:16]
            return MethodNotAllowed(f"{path} does not accept {method}; it accepts {allow}.", allow=allow)
        if status < 500:
            return MalformedBody("The request could not be read.")
        return ServiceError("internal error")

    def _methods(self, scope: Scope) -> set[str]:
        """Return the methods of every route of the path: Starlette names those of the first one only."""
        return set().union(*(route.methods or () for route in self._routes if _matches(route, scope)))

    def _right_path(self, scope: Scope) -> str | None:
        """Return the path of the route that was probably meant, under the prefix that the request used."""
        path, root = scope["path"][:_MAX_SHOWN_CHARS], scope.get("root_path", "")
        prefix = root if root and path.startswith(f"{root}/") else ""
        segments = [segment for segment in path.removeprefix(prefix).split("/") if segment][-_MAX_SEGMENTS:]
        for candidate in _candidates(segments):
            at = {**scope, "path": candidate, "root_path": ""}
            if any(_matches(route, at) for route in self._routes):
                return prefix + candidate
        close = get_close_matches("/" + "/".join(segments), self._literal, n=1, cutoff=_SIMILARITY)
        return prefix + close[0] if close else None


def _matches(route: Route, scope: Scope) -> bool:
    return route.matches(scope)[0] is not Match.NONE


def _candidates(segments: list[str]) -> Iterator[str]:
    """Yield the paths that a path may stand for, the longest first: its last segments, with /v1 and without."""
    for i in range(len(segments)):
        rest = "/".join(segments[i:])
        yield f"{_API}/{rest}"
        yield f"/{rest}"
        if rest in _OTHER_NAMES:
            yield _OTHER_NAMES[rest]
