"""ApiRoute: the description of one endpoint, defined beside its handler. Imports fastapi, starlette, msgspec, pydantic.

The app registers these rows and the OpenAPI document describes them; neither names an endpoint itself.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope


class DirectRoute(Route):
    """Calls a handler of the request, or of nothing, without FastAPI's search for parameters at a start and later."""

    def __init__(self, path: str, handler: Callable[..., Awaitable[Response]], *, methods: Iterable[str]) -> None:
        super().__init__(path, handler if inspect.signature(handler).parameters else _without_request(handler))
        self.methods = set(methods)  # a GET of Starlette's own takes HEAD as well

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Name the route in the scope, as FastAPI's own do: logs, metrics and traces have its path."""
        match, child_scope = super().matches(scope)
        return match, child_scope if match is Match.NONE else {**child_scope, "route": self}


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
    route_class: type[DirectRoute] = DirectRoute  # unless the handler takes more than the request

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
        is_direct = set(inspect.signature(route.handler).parameters) <= {"request"}
        for methods in ([method for method in route.verbs if method != "HEAD"], ["HEAD"]):
            if not set(methods) & set(route.verbs):
                continue
            if is_direct:
                router.routes.append(route.route_class(route.path, route.handler, methods=methods))
            else:
                router.add_api_route(route.path, route.handler, methods=methods)
    return router


def described_routes(routes: Iterable[ApiRoute]) -> list[BaseRoute]:
    """Return what FastAPI describes in an OpenAPI document: the routes that have a title, in this order."""
    router = APIRouter()
    for route in routes:
        if methods := [method for method in route.verbs if method != "HEAD" and route.summary]:
            router.add_api_route(route.path, route.handler, methods=methods, summary=route.summary)
    return router.routes


def _without_request(handler: Callable[[], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def of_request(request: Request) -> Response:
        return await handler()

    return of_request
