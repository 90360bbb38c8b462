"""create_app: the ASGI application of one HTTP worker. Imports engine.interface and server.

AccessLog (id, log line, exceptions) → CORS → KeyGuard → BodyLimit → FastAPI: routers, handlers → reply, streaming
"""

import time
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from engine.interface.client import EngineClient
from engine.interface.config import ServerConfig
from engine.interface.control import Supervisor
from engine.interface.errors import ServiceError
from engine.interface.metrics import Metrics
from server.api.embeddings.schema import EmbeddingBody
from server.api.error_replies import error_from_http, error_reply
from server.api.messages.schema import CountTokensBody, MessagesBody
from server.api.request_record import OpenRequests, record_of
from server.api.responses.schema import ResponsesBody
from server.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from server.api.service import Service, make_service
from server.config.api_keys import KeyRing
from server.config.version import package_version
from server.errors import ClientGone
from server.http.access_log import AccessLog, RequestTracer
from server.http.auth import KeyGuard
from server.http.metrics import HttpMetrics
from server.http.openapi import openapi_document
from server.http.routes.embeddings import embeddings_router
from server.http.routes.generate import chat_router, completions_router
from server.http.routes.health import metrics_router, public_router
from server.http.routes.kv import kv_router
from server.http.routes.messages import messages_router
from server.http.routes.models import models_router, requests_router
from server.http.routes.pages import chat_page_router, pages_router, public_pages_router
from server.http.routes.request_body import BodyLimit
from server.http.routes.responses import responses_router
from server.http.routes.tokenize import tokens_router

_BODIES: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        ChatBody,
        CompletionBody,
        ResponsesBody,
        MessagesBody,
        CountTokensBody,
        TokenizeBody,
        DetokenizeBody,
        EmbeddingBody,
    )
}


def create_app(
    config: ServerConfig,
    *,
    client: EngineClient,
    supervisor: Supervisor,
    metrics: Metrics,
    open_requests: OpenRequests,
    http_metrics: HttpMetrics,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    """Load the model's text side and return the app. Raises StartupError."""
    service = make_service(config, client=client, supervisor=supervisor, metrics=metrics, created=int(time.time()))
    # No slash redirects: they would be built from the client's Host header.
    # No pages of FastAPI's: they load their scripts from a public host.
    app = FastAPI(
        title="Quire",
        version=package_version(),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=lambda app: service.grammars,
    )
    public = public_router(service)
    pages, chat_page = public_pages_router(), chat_page_router()
    routers = [public, pages, chat_page]  # first, so that what KeyGuard finds to be public is answered by them
    for make_router in (
        chat_router,
        completions_router,
        responses_router,
        messages_router,
        embeddings_router,
        tokens_router,
        models_router,
        metrics_router,
        kv_router,
    ):
        routers.append(make_router(service))
    routers += [requests_router(service, open_requests), pages_router()]
    for router in routers:
        app.include_router(router)
    http_metrics.create_series(routers)
    _handle_errors(app, service)
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes)
    if config.api_key_hashes:
        keys = KeyRing(config.api_key_hashes, newer=lambda: supervisor.key_hashes)
        shown = [*public.routes, *pages.routes, *chat_page.routes]
        app.add_middleware(KeyGuard, keys=keys, public=shown, on_refusal=service.count_rejected)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-quire-ignored", "retry-after", "traceresponse"],
        )
    app.add_middleware(
        AccessLog, tracker=open_requests, on_end=http_metrics.end, tracer=tracer, root_path=config.root_path
    )
    app.openapi = lambda: _openapi(app, needs_key=bool(config.api_key_hashes))  # type: ignore[method-assign]
    return app


def _handle_errors(app: FastAPI, service: Service) -> None:
    async def handle_service_error(request: Request, error: ServiceError) -> Response:
        record = record_of(request.scope)
        if isinstance(error, ClientGone):
            record.outcome = "abort"
            service.metrics.count("http_disconnects_total")
        else:
            record.outcome = error.code
            if request.method == "POST":
                service.count_rejected(error)
        reply = error_reply(error, request_id=record.request_id, path=request.scope["path"])
        return Response(reply.body, status_code=reply.status, media_type="application/json", headers=reply.headers)

    async def handle_http_exception(request: Request, error: HTTPException) -> Response:
        found = error_from_http(
            error.status_code, path=request.scope["path"], method=request.method, headers=error.headers
        )
        return await handle_service_error(request, found)

    async def handle_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return await handle_service_error(request, ClientGone("The client left."))

    app.add_exception_handler(ServiceError, handle_service_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, handle_http_exception)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, handle_disconnect)  # type: ignore[arg-type]


def _openapi(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = openapi_document(app, bodies=_BODIES, needs_key=needs_key)
    return app.openapi_schema
