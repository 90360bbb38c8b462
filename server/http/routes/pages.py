"""Routes of the static pages: GET /docs (API reference), /kv (live KV cache), / (chat for browsers, else JSON).

Each page is one response that loads nothing from elsewhere. They hold no data and need no key: browsers send no key
with a typed address, so the page asks for the key and sends it with its requests. A request to / that does not accept
HTML gets the server's name, version and links.
"""

import base64
import gzip
import re
from hashlib import sha256
from pathlib import Path

import msgspec
from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from starlette.routing import Match
from starlette.types import Scope

from server.config.version import package_version
from server.http.routes.api_route import ApiRoute, DirectRoute
from server.http.routes.reply import json_reply

_PAGES = Path(__file__).resolve().parent.parent.parent / "pages"
# Nothing but the page's own script and style, and the data beside it.
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# They share one scope, so each may use what those before it define.
_DOCS_SCRIPTS = ("schema", "try", "page")
_KV_SCRIPTS = ("format", "snapshot", "feed", "pool", "table", "timeline", "trial", "page")


def docs_routes() -> list[ApiRoute]:
    """Return the route, which needs no key: its page asks for one and reads /openapi.json with it."""
    page, policy = assemble("docs", scripts=_DOCS_SCRIPTS)

    async def docs() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy, "cache-control": "no-cache"})

    return [ApiRoute(path="/docs", handler=docs, is_public=True)]


def kv_page_routes() -> list[ApiRoute]:
    """Return the route, which needs no key: its page holds no data."""
    page, policy = assemble("kv", scripts=_KV_SCRIPTS)

    async def kv() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy, "cache-control": "no-cache"})

    return [ApiRoute(path="/kv", handler=kv, is_public=True)]


def assemble(name: str, *, scripts: tuple[str, ...], libraries: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return pages/NAME with its style and scripts put in, and the policy that lets these run and no others."""
    folder = _PAGES / name
    style = (folder / "style.css").read_text(encoding="utf-8")
    files = [f"vendor/{library}.js" for library in libraries] + [f"{script}.js" for script in scripts]
    script = "".join((folder / file).read_text(encoding="utf-8") for file in files)
    page = (folder / "page.html").read_text(encoding="utf-8")
    page = page.replace("<style></style>", f"<style>{style}</style>")
    page = page.replace("<script></script>", f'<script type="module">{script}</script>')
    return page, _POLICY.format(script=_source(script), style=_source(style))


def _source(text: str) -> str:
    """Name an inline script or style as Content Security Policy, level 3, §2.3.1, does."""
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


_SCRIPTS = (
    *("dom", "libraries", "colours", "math", "markdown", "server", "attachments", "store", "words", "blocks", "answer"),
    *("messages", "request", "settings", "sidebar", "shortcuts", "kv", "welcome", "page"),
)
# Fetched by the page when an answer has code or a formula, and run only if the page's policy names their hash.
_LAZY_LIBRARIES = ("highlight", "temml")
_HTML = re.compile(r"(?:^|,)\s*text/html\s*(?:[;,]|$)", re.IGNORECASE)
_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:,|$|;\s*q=(?:1|0\.0{0,2}[1-9]))", re.IGNORECASE)


class Root(msgspec.Struct):
    """The reply of GET / to programs. links: paths of this server by what they are."""

    name: str
    version: str
    links: dict[str, str]


_LINKS = {"api": "/v1", "models": "/v1/models", "documentation": "/docs", "openapi": "/openapi.json"}
_LINKS |= {"health": "/health", "ready": "/ready", "metrics": "/metrics", "kv_cache": "/kv"}


class _AtRoot(DirectRoute):
    """Matches the root behind a proxy's prefix also without its slash."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        has_slash = scope["path"] != scope.get("root_path", "")
        return super().matches(scope if has_slash else {**scope, "path": f"{scope['path']}/"})


def root_routes() -> list[ApiRoute]:
    """Return the page's route and those of its libraries, which need no key, with the page put together."""
    text, policy = assemble("chat", scripts=_SCRIPTS, libraries=("marked",))
    lazy = {name: (_PAGES / "chat" / "vendor" / f"{name}.js").read_text(encoding="utf-8") for name in _LAZY_LIBRARIES}
    sources = " ".join(_source(script) for script in lazy.values())
    policy = policy.replace("script-src ", f"script-src {sources} ")
    plain = text.encode()
    packed = gzip.compress(plain, mtime=0)
    for_all = {"cache-control": "no-cache", "vary": "accept, accept-encoding"}
    headers = for_all | {"content-security-policy": policy}
    headers |= {"referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}

    async def root(request: Request) -> Response:
        if not _HTML.search(",".join(request.headers.getlist("accept"))):
            prefix = request.scope.get("root_path", "")
            links = {name: prefix + path for name, path in _LINKS.items()}
            return json_reply(Root("Quire", package_version(), links), for_all)
        if _GZIP.search(request.headers.get("accept-encoding", "")):
            return HTMLResponse(packed, headers={**headers, "content-encoding": "gzip"})
        return HTMLResponse(plain, headers=headers)

    return [
        ApiRoute(
            path="/",
            handler=root,
            summary="Name, version and links of the server; for browsers the chat page",
            is_public=True,
            answer=Root,
            has_page=True,
            route_class=_AtRoot,
        ),
        *(_library_route(name, script.encode()) for name, script in lazy.items()),
    ]


def _library_route(name: str, plain: bytes) -> ApiRoute:
    """Return the route of one library. A browser asks again whether its copy is the current one, and gets a 304."""
    packed = gzip.compress(plain, mtime=0)
    headers = {"cache-control": "no-cache", "vary": "accept-encoding", "x-content-type-options": "nosniff"}
    headers["etag"] = f'W/"{sha256(plain).hexdigest()[:32]}"'

    async def library(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        is_packed = bool(_GZIP.search(request.headers.get("accept-encoding", "")))
        encoding = {"content-encoding": "gzip"} if is_packed else {}
        return Response(packed if is_packed else plain, media_type="text/javascript", headers=headers | encoding)

    return ApiRoute(path=f"/vendor/{name}.js", handler=library, is_public=True)
