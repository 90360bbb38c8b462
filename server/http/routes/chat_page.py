"""GET / for browsers: the chat page, an empty shell that anybody may load, as /kv is.

What does not ask for HTML gets at / what it gets on every unknown path: probes and scripts see no page, and a 401 where
keys are set.
"""

import gzip
import re

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from server.http.routes.pages import assemble

_SCRIPTS = ("dom", "markdown", "server", "store", "answer", "messages", "settings", "sidebar", "kv", "welcome", "page")
_HTML = re.compile(r"(?:^|,)\s*text/html\s*(?:[;,]|$)", re.IGNORECASE)
_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:,|$|;\s*q=(?:1|0\.0{0,2}[1-9]))", re.IGNORECASE)


class _ForBrowsers(APIRoute):
    """Matches nothing but GET and HEAD that accept HTML."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        methods = self.methods or ()
        if scope["type"] == "http" and scope["method"] in methods and _HTML.search(_header(scope, b"accept")):
            # behind a proxy's prefix the slash may be missing
            has_slash = scope["path"] != scope.get("root_path", "")
            return super().matches(scope if has_slash else {**scope, "path": f"{scope['path']}/"})
        return Match.NONE, {}


def chat_page_router() -> APIRouter:
    """Return the route, with the page put together."""
    router = APIRouter(include_in_schema=False, route_class=_ForBrowsers)
    text, policy = assemble("chat", scripts=_SCRIPTS, libraries=("marked",))
    plain = text.encode()
    packed = gzip.compress(plain, mtime=0)
    headers = {"content-security-policy": policy, "cache-control": "no-cache", "vary": "accept, accept-encoding"}
    headers |= {"referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}

    @router.head("/")
    @router.get("/")
    async def chat_page(request: Request) -> Response:
        if _GZIP.search(request.headers.get("accept-encoding", "")):
            return HTMLResponse(packed, headers={**headers, "content-encoding": "gzip"})
        return HTMLResponse(plain, headers=headers)

    return router


def _header(scope: Scope, name: bytes) -> str:
    return ",".join(value.decode("latin-1") for key, value in scope["headers"] if key == name)
