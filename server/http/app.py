"""create_app: the ASGI application of one HTTP worker. Imports engine.interface and server.

AccessLog (id, log line, exceptions) → HostGuard → CORS → KeyGuard → BodyLimit
→ FastAPI: ApiRoutes, handlers → reply, streaming
"""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from engine.interface.client import EngineClient
from engine.interface.config import ServerConfig
from engine.interface.control import LauncherChannel
from engine.interface.errors import ServiceError
from engine.interface.metrics import Metrics
from server.api.app_state import AppState, make_app_state
from server.api.error_replies import error_reply
from server.api.rate_headers import RATE_HEADERS
from server.api.request_record import OpenRequests, path_of, record_of
from server.config.api_keys import ROLES, KeyRing
from server.config.version import package_version
from server.errors import ClientGone
from server.http.access_log import AccessLog
from server.http.auth import HostGuard, KeyGuard
from server.http.metrics import HttpMetrics
from server.http.openapi import openapi_document
from server.http.routes.api_route import ApiRoute, router_of
from server.http.routes.embeddings import embeddings_routes
from server.http.routes.generate import chat_routes, completions_routes
from server.http.routes.health import health_routes, metrics_routes
from server.http.routes.kv import kv_routes
from server.http.routes.messages import messages_routes
from server.http.routes.models import models_routes, requests_routes
from server.http.routes.pages import docs_routes, kv_page_routes, root_routes
from server.http.routes.request_body import BodyLimit
from server.http.routes.responses import responses_routes
from server.http.routes.tokenize import render_routes, tokenizer_info_routes, tokens_routes
from server.http.routes.usage import usage_routes
from server.http.tracing import Tracer
from server.http.unrouted import RouteGuide


def create_app(
    config: ServerConfig,
    *,
    client: EngineClient,
    launcher: LauncherChannel,
    metrics: Metrics,
    open_requests: OpenRequests,
    http_metrics: HttpMetrics,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Load the model's text side and return the app. Raises StartupError."""
    app_state = make_app_state(config, client=client, launcher=launcher, metrics=metrics, created=int(time.time()))
    # No slash redirects: they would be built from the client's Host header.
    # No pages of FastAPI's: they load their scripts from a public host.
    app = FastAPI(
        title="Quire",
        version=package_version(),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=lambda app: app_state.grammars,
    )
    routes = _routes(app_state, open_requests)
    # Public ones before others, so that what KeyGuard finds to be public is answered by them; those that stream before
    # all, whose paths none of them has, as each is compared. All in the app's own router: one that is included would
    # be searched twice for each request.
    router_of(sorted(routes, key=lambda route: (route.stream is None, not route.is_public)), router=app.router)
    http_metrics.create_series(route.path for route in routes)
    _handle_errors(app, app_state, RouteGuide(app.routes))
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes, work=app_state.work)
    if config.api_key_hashes:
        app.add_middleware(
            KeyGuard,
            keys=KeyRing(
                config.api_key_hashes,
                roles=config.api_key_roles,
                newer=lambda: launcher.key_hashes,
                newer_roles=lambda: launcher.key_roles,
                tenants=config.api_key_tenants,
                newer_tenants=lambda: launcher.key_tenants,
            ),
            public=router_of(route for route in routes if route.is_public).routes,
            routes_of={role: router_of(route for route in routes if route.role == role).routes for role in ROLES},
            on_refusal=app_state.count_rejected,
        )
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                "x-request-id",
                "request-id",
                "x-should-retry",
                "x-quire-ignored",
                "x-quire-cache",
                "retry-after",
                "traceresponse",
                *RATE_HEADERS,
            ],
        )
    if config.allowed_hosts is not None:
        app.add_middleware(
            HostGuard,
            hosts=config.allowed_hosts,
            origins=config.cors_origins,
            on_refusal=app_state.count_rejected,
        )
    app.add_middleware(
        AccessLog, open_requests=open_requests, on_end=http_metrics.end, tracer=tracer, root_path=config.root_path
    )
    app.openapi = lambda: _openapi(app, routes, client, needs_key=bool(config.api_key_hashes))  # type: ignore[method-assign]
    return app


def _routes(app_state: AppState, open_requests: OpenRequests) -> list[ApiRoute]:
    """Return all endpoints, in the order of the OpenAPI document."""
    return [
        *health_routes(app_state),
        *kv_page_routes(),
        *root_routes(),
        *chat_routes(app_state),
        *completions_routes(app_state),
        *responses_routes(app_state),
        *messages_routes(app_state),
        *embeddings_routes(app_state),
        *tokens_routes(app_state),
        *render_routes(app_state),
        *models_routes(app_state),
        *tokenizer_info_routes(app_state),
        *metrics_routes(app_state),
        *usage_routes(app_state),
        *kv_routes(app_state),
        *requests_routes(app_state, open_requests),
        *docs_routes(),
    ]


def _handle_errors(app: FastAPI, app_state: AppState, guide: RouteGuide) -> None:
    async def handle_service_error(request: Request, error: ServiceError) -> Response:
        record = record_of(request.scope)
        if isinstance(error, ClientGone):
            record.outcome = "abort"
            app_state.metrics.count("http_disconnects_total")
        else:
            record.outcome = error.code
            if request.method == "POST":
                app_state.count_rejected(error)
        reply = error_reply(error, request_id=record.request_id, path=path_of(request.scope))
        return Response(reply.body, status_code=reply.status, media_type="application/json", headers=reply.headers)

    async def handle_http_exception(request: Request, error: HTTPException) -> Response:
        return await handle_service_error(request, guide.error(error.status_code, request.scope))

    async def handle_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return await handle_service_error(request, ClientGone("The client left."))

    app.add_exception_handler(ServiceError, handle_service_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, handle_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, handle_disconnect)  # type: ignore[arg-type]


def _openapi(app: FastAPI, routes: Sequence[ApiRoute], client: EngineClient, *, needs_key: bool) -> dict[str, Any]:
    if app.openapi_schema is not None:
        return app.openapi_schema
    if client.ready is None:  # the next one will know the vocabulary
        return openapi_document(app, routes, needs_key=needs_key)
    app.openapi_schema = openapi_document(app, routes, needs_key=needs_key, vocab_size=client.ready.vocab_size)
    return app.openapi_schema
