"""GET /health, /ping, /ready and /version, which need no API key, and /metrics, which does."""

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from engine.interface.control import LOAD_STALL_AFTER_S, STALL_AFTER_S
from server.api.app_state import AppState
from server.api.request_record import record_of
from server.config.version import package_version
from server.http.routes.api_route import ApiRoute

_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_DETAILS = {
    "restarting": "The engine process ended, and the next one is on its way: GET /ready tells when it serves.",
    "waiting": "The engine was stopped for the next daemon, or has ended and the standby takes over: requests wait.",
    "dead": "The engine ended or hung, as the last ones did, before it had served for a minute; more are tried.",
    "stalled": f"The engine's loop has made no progress for {STALL_AFTER_S:g} s or more, or the load of the next engine"
    f" for {LOAD_STALL_AFTER_S:g} s.",
}


class Health(msgspec.Struct):
    """The reply of GET /health; detail: the fault; engines: of --disaggregate, by name: "ready" or "missing"."""

    status: str
    detail: str | msgspec.UnsetType = msgspec.UNSET
    engines: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Ready(msgspec.Struct):
    """The reply of GET /ready; done: the finished part of the stage, 0 to 1."""

    stage: str
    done: float


class Version(msgspec.Struct):
    """The reply of GET /version."""

    version: str


def health_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the routes that need no key, bound to one worker's state, the only state they show."""

    async def health(request: Request) -> Response:
        # An engine that is missing after "ready" has ended, whether or not the launcher has reported it.
        state = app_state.launcher.state
        is_lost = state.stage.name == "ready" and app_state.client.ready is None
        fault = state.fault or ("restarting" if is_lost else "")
        served = app_state.client.engines
        answer: dict[str, object] = {"status": f"engine {fault}" if fault else "ok"}
        if fault:
            answer["detail"] = _DETAILS["waiting" if app_state.lets_wait and fault == "restarting" else fault]
        # names of engines have the addresses of other hosts: nothing for those without a key, where there are keys
        if served and (record_of(request.scope).key_hash or not app_state.config.api_key_hashes):
            answer["engines"] = {name: "ready" if is_ready else "missing" for name, is_ready in served.items()}
        return JSONResponse(answer, status_code=200 if state.is_alive else 503)

    async def ready() -> Response:
        state = app_state.launcher.state
        is_ready = state.stage.name == "ready" and app_state.client.ready is not None and not state.is_draining
        stage = "draining" if state.is_draining else state.stage.name
        if stage == "ready" and not is_ready:
            stage = "restarting"
        done = state.stage.done / state.stage.total if state.stage.total else float(is_ready)
        return JSONResponse({"stage": stage, "done": done}, status_code=200 if is_ready else 503)

    async def version() -> Response:
        return JSONResponse({"version": package_version()})

    return [
        ApiRoute(
            path="/health",
            handler=health,
            summary="Alive: 503 if the engine stands still, or does not come back",
            is_public=True,
            answer=Health,
            is_state=True,
        ),
        *(
            ApiRoute(  # the name of SageMaker, and of vLLM, where POST does the same
                path="/ping",
                methods=methods,
                handler=health,
                summary="The same as /health",
                is_public=True,
                answer=Health,
                is_state=True,
            )
            for methods in (("GET", "HEAD"), ("POST",))
        ),
        ApiRoute(
            path="/ready",
            handler=ready,
            summary="Ready for requests",
            is_public=True,
            answer=Ready,
            is_state=True,
        ),
        ApiRoute(
            path="/version",
            handler=version,
            summary="Version of the server",
            is_public=True,
            answer=Version,
        ),
    ]


def metrics_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the route, bound to one worker's state."""

    async def metrics(request: Request) -> Response:
        is_open_metrics = _takes_open_metrics(",".join(request.headers.getlist("accept")))
        page = await app_state.launcher.scrape(is_open_metrics=is_open_metrics)
        kind = _OPEN_METRICS if is_open_metrics else _PROMETHEUS_TEXT
        return Response(page, media_type=kind, headers={"vary": "accept"})

    return [
        ApiRoute(
            path="/metrics",
            handler=metrics,
            summary="Prometheus metrics",
            role="metrics",
            media_type="text/plain",
        )
    ]


def _takes_open_metrics(accept: str) -> bool:
    """Tell whether a client prefers OpenMetrics to Prometheus' text, or has them alike (RFC 9110, §12.5.1)."""
    weights: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        if kind == "application/openmetrics-text" and given.get("version", "1.0.0") != "1.0.0":
            continue
        try:
            weight = float(given.get("q", "1"))
        except ValueError:
            weight = 0.0
        weights[kind] = max(weights.get(kind, 0.0), weight)
    return weights.get("application/openmetrics-text", 0.0) >= max(weights.get("text/plain", 0.0), 0.001)
