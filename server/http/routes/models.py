"""GET /v1/models and /v1/models/{id}."""

import msgspec
from fastapi import APIRouter, Response

from server.api.objects import ModelCard, ModelList
from server.api.service import Service


def models_router(service: Service) -> APIRouter:
    """Return the routes, bound to one worker's service."""
    router = APIRouter()

    def card(name: str) -> ModelCard:
        ready, root = service.client.ready, service.config.served_model_names[0]
        return ModelCard(
            id=name,
            created=service.created,
            root=root,
            parent=root if service.lora_index(name) else None,
            max_model_len=ready.max_model_len if ready is not None else None,
        )

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models", summary="List the served models")
    async def list_models() -> Response:
        names = service.config.served_model_names + service.config.lora_names
        return _json(ModelList(data=[card(name) for name in names]))

    @router.head("/v1/models/{model_id:path}", include_in_schema=False)
    @router.get("/v1/models/{model_id:path}", summary="One served model")
    async def get_model(model_id: str) -> Response:
        return _json(card(service.model_name(model_id)))

    return router


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
