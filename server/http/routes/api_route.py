"""ApiRoute: the description of one endpoint, defined beside its handler. Imports fastapi, msgspec, pydantic, server.

The app registers these rows and the OpenAPI document describes them; neither names an endpoint itself.

DirectRoutes: calls the handlers of a POST to a fixed path without the router. A first token would wait while four
layers of middleware and router, each with a wrapper around `send`, find the one handler that such a request can have.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.interface.errors import ServiceError
from server.api.request_record import record_of

Fault = ServiceError | HTTPException | ClientDisconnect  # what the app has a reply to


class DirectRoute(APIRoute):
    """Calls a handler of the request alone without FastAPI's search for parameters."""

    @property
    def takes_request_alone(self) -> bool:
        """Whether the handler has the request, and nothing that FastAPI finds in it for the handler."""
        return list(inspect.signature(self.endpoint).parameters) == ["request"]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute.get_route_handler."""
        return self.endpoint if self.takes_request_alone else super().get_route_handler()


@dataclass(frozen=True, kw_only=True)
class ApiRoute:
    """One endpoint. `summary`: its title in the OpenAPI document, which leaves it out if there is none."""

    path: str
    handler: Callable[..., Awaitable[Response]]
    methods: tuple[str, ...] = ()  # none: POST for a route with a body, else GET and HEAD
    summary: str = ""
    is_public: bool = False  # answers without an API key
    role: str = "inference"  # of the API key (server/config/api_keys.py); "": any key
    body: type[BaseModel] | None = None  # the JSON that it reads
    example: Mapping[str, object] | None = None  # a body that any model with the route's ability answers
    answer: type[msgspec.Struct] | None = None  # the JSON of its 200
    is_list: bool = False  # the answer is a list of these
    stream: type[msgspec.Struct] | str | None = None  # the chunks of its event stream, or its named events in words
    media_type: str = "application/json"
    has_page: bool = False  # browsers get a page instead of the answer
    error_statuses: tuple[int, ...] = ()  # besides those that every route has, or every route with a body
    is_state: bool = False  # its 503 has the body of its 200
    route_class: type[APIRoute] = DirectRoute

    @property
    def verbs(self) -> tuple[str, ...]:
        """The methods, or their default. HEAD is a route of its own, which the document leaves out."""
        return self.methods or (("POST",) if self.body is not None else ("GET", "HEAD"))

    @property
    def document_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


def router_of(routes: Iterable[ApiRoute], *, router: APIRouter | None = None) -> APIRouter:
    """Return a router with all of the routes, in this order: a new one, or the given one with them added."""
    router = APIRouter() if router is None else router
    for route in routes:
        if methods := [method for method in route.verbs if method != "HEAD"]:
            _add(router, route, methods, is_shown=bool(route.summary))
        if "HEAD" in route.verbs:
            _add(router, route, ["HEAD"], is_shown=False)
    return router


def _add(router: APIRouter, route: ApiRoute, methods: list[str], *, is_shown: bool) -> None:
    router.add_api_route(
        route.path,
        route.handler,
        methods=methods,
        summary=route.summary or None,
        include_in_schema=is_shown,
        route_class_override=route.route_class,
    )


class DirectRoutes:
    """Pure ASGI middleware, inside all others. Requests that it has no route for go on to the app, which has them all:
    a GET to a path of these is its 405.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Iterable[BaseRoute],
        reply_to: Callable[[Request, Fault], Awaitable[Response]],
    ) -> None:
        """routes: of the app; those are called here that have a fixed path, POST alone and a handler of the request.

        reply_to: makes the reply to an error of a handler.
        """
        self._app = app
        self._routes = {route.path: route for route in routes if _is_direct(route)}
        self._reply_to = reply_to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the handler, or hand the request on."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(_route_path(scope)) if is_post else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route  # as the router does: metrics, logs and traces name it
        request = Request(scope, receive, send)
        try:
            response = await route.endpoint(request)
            await response(scope, receive, send)
        except (ServiceError, HTTPException, ClientDisconnect) as error:
            if record_of(scope).has_started:
                raise
            response = await self._reply_to(request, error)
            await response(scope, receive, send)
            error.__traceback__ = None  # in a cycle with frames that have the body, whose memory is to be free now


def _is_direct(route: BaseRoute) -> TypeGuard[DirectRoute]:
    """Return whether method and path alone tell that a request is for this route, and its handler needs no more."""
    if not isinstance(route, DirectRoute) or not route.takes_request_alone:
        return False
    return route.methods == {"POST"} and "{" not in route.path


def _route_path(scope: Scope) -> str:
    """Return the path that routes are compared with: without the prefix that a proxy may leave in it, as Starlette."""
    path, root_path = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root_path) :] if root_path and path.startswith(f"{root_path}/") else path
