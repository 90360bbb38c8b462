"""GET /health, /ready, /version and /metrics."""

import importlib.metadata

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from server.service import Service

_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def health_router(service: Service) -> APIRouter:
    """Return the routes, bound to one worker's service."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Alive: 503 only if the engine died")
    async def health() -> Response:
        # An engine that loads is alive; one that is missing after "ready" is dead, and so is one to be restarted.
        stage = service.supervisor.state.stage.name
        is_dead = stage == "restarting" or (stage == "ready" and service.client.ready is None)
        return JSONResponse({"status": "engine dead" if is_dead else "ok"}, status_code=503 if is_dead else 200)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="Ready for requests")
    async def ready() -> Response:
        state = service.supervisor.state
        is_ready = state.stage.name == "ready" and service.client.ready is not None and not state.is_draining
        stage = "draining" if state.is_draining else state.stage.name
        if stage == "ready" and not is_ready:
            stage = "restarting"
        done = state.stage.done / state.stage.total if state.stage.total else float(is_ready)
        return JSONResponse({"stage": stage, "done": done}, status_code=200 if is_ready else 503)

    @router.get("/version", summary="Version of the server")
    async def version() -> Response:
        return JSONResponse({"version": _version()})

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(await service.supervisor.scrape(), media_type=_PROMETHEUS_TEXT)

    return router


def _version() -> str:
    try:
        return importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
