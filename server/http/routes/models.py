"""Routes GET /v1/models, GET /v1/models/{id} and DELETE /v1/requests/{id}.

DELETE ends a running request, in whichever HTTP worker it runs.
"""

from datetime import UTC, datetime

from fastapi import Request, Response

from server.api.app_state import AppState
from server.api.messages.objects import ModelInfo, ModelPage
from server.api.objects import CancelledRequest, ModelCard, ModelList
from server.api.request_record import OpenRequests, record_of
from server.errors import NotFound, RequestNotFound
from server.http.routes.api_route import ApiRoute
from server.http.routes.reply import json_reply

_ANTHROPIC_HEADER = "anthropic-version"  # Anthropic's clients send it with every request


def models_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the routes, bound to one worker's state."""

    def card(name: str) -> ModelCard:
        ready, root = app_state.client.ready, app_state.config.served_model_names[0]
        return ModelCard(
            id=name,
            created=app_state.created,
            root=root,
            parent=root if app_state.lora_index(name) else None,
            max_model_len=ready.max_model_len if ready is not None else None,
        )

    def info(name: str) -> ModelInfo:
        shown, created = card(name), datetime.fromtimestamp(app_state.created, UTC)
        return ModelInfo(
            id=name,
            display_name=name,
            created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            max_input_tokens=shown.max_model_len,
            max_tokens=shown.max_model_len,
        )

    async def list_models(request: Request) -> Response:
        names = app_state.config.served_model_names + app_state.config.lora_names
        if _ANTHROPIC_HEADER in request.headers:
            return json_reply(ModelPage(data=[info(name) for name in names], first_id=names[0], last_id=names[-1]))
        return json_reply(ModelList(data=[card(name) for name in names]))

    async def get_model(model_id: str, request: Request) -> Response:
        if not model_id:
            raise NotFound("There is no route /v1/models/: it is /v1/models on this server.")
        name = app_state.model_name(model_id)
        return json_reply(info(name) if _ANTHROPIC_HEADER in request.headers else card(name))

    return [
        ApiRoute(
            path="/v1/models",
            handler=list_models,
            summary="List the served models",
            answer=ModelList,
        ),
        ApiRoute(
            path="/v1/models/{model_id:path}",
            handler=get_model,
            summary="One served model",
            answer=ModelCard,
        ),
    ]


def requests_routes(app_state: AppState, open_requests: OpenRequests) -> list[ApiRoute]:
    """Return the route, bound to one worker's state and requests."""

    async def cancel_request(request_id: str, request: Request) -> Response:
        key_hash = record_of(request.scope).key_hash
        is_here = open_requests.cancel(request_id, key_hash=key_hash)
        is_elsewhere = await app_state.launcher.cancel(request_id, key_hash=key_hash)
        if not is_here and not is_elsewhere:
            raise RequestNotFound(f"No request with the id {request_id[:200]!r} is running.")
        return json_reply(CancelledRequest(request_id))

    return [
        ApiRoute(
            methods=("DELETE",),
            path="/v1/requests/{request_id:path}",
            handler=cancel_request,
            summary="Cancel a running request by its id or x-request-id",
            answer=CancelledRequest,
        )
    ]
