"""GET /v1/models and /v1/models/{id}."""

import msgspec
from fastapi import APIRouter, Response

from server.chunks import ModelCard, ModelList
from server.service import Service


def models_router(service: Service) -> APIRouter:
    """Return the routes, bound to one worker's service."""
    router = APIRouter()

    def card(name: str) -> ModelCard:
        ready = service.client.ready
        return ModelCard(
            id=name, created=service.created, max_model_len=ready.max_model_len if ready is not None else None
        )

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", summary="List the served models")
    async def list_models() -> Response:
        return _json(ModelList(data=[card(name) for name in service.config.served_model_names]))

    @router.head("/v1/models/{model_id:path}", include_in_schema=False)
    @router.get("/v1/models/{model_id:path}", summary="One served model")
    async def get_model(model_id: str) -> Response:
        return _json(card(service.model_name(model_id)))

    return router


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
