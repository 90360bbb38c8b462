"""ApiRoute: the description of one endpoint, defined beside its handler. Imports fastapi, msgspec, pydantic.

The app registers these rows and the OpenAPI document describes them; neither names an endpoint itself.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel


class DirectRoute(APIRoute):
    """Calls a handler of the request alone without FastAPI's search for parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute.get_route_handler."""
        takes_request_alone = list(inspect.signature(self.endpoint).parameters) == ["request"]
        return self.endpoint if takes_request_alone else super().get_route_handler()


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
