"""GET /docs, the API reference, and GET /kv, the live KV cache: static pages that load nothing from elsewhere.

A page is one answer. /docs reads /openapi.json and needs a key like it. /kv is an empty shell that anybody may load: a
browser sends no key with an address that is typed in, so the page asks for one itself and sends it for its data.
"""

import base64
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

_PAGES = Path(__file__).resolve().parent.parent.parent / "pages"
# Nothing but the page's own script and style, and the data beside it.
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# They share one scope, so each may use what those before it define.
_KV_SCRIPTS = ("format", "snapshot", "feed", "pool", "table", "timeline", "page")


def pages_router() -> APIRouter:
    """Return the routes that need a key, with their pages read."""
    router = APIRouter(include_in_schema=False)
    page = (_PAGES / "docs.html").read_text(encoding="utf-8")
    policy = _POLICY.format(script="'unsafe-inline'", style="'unsafe-inline'")

    @router.head("/docs")
    @router.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    return router


def public_pages_router() -> APIRouter:
    """Return the routes that need none: their pages hold no data."""
    router = APIRouter(include_in_schema=False)
    page, policy = assemble("kv", scripts=_KV_SCRIPTS)

    @router.head("/kv")
    @router.get("/kv")
    async def kv() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy, "cache-control": "no-cache"})

    return router


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
