"""GET /docs: the API reference, one static page that reads /openapi.json and loads nothing from elsewhere."""

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

_PAGES = Path(__file__).resolve().parent.parent / "pages"
# Nothing but the page's own script and style, and the document beside it.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def pages_router() -> APIRouter:
    """Return the route, with the page read."""
    router = APIRouter(include_in_schema=False)
    page = (_PAGES / "docs.html").read_text(encoding="utf-8")

    @router.head("/docs")
    @router.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _POLICY})

    return router
