"""DELETE /v1/requests/{id}: ends a running request, whichever HTTP worker serves it."""

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.objects import CancelledRequest
from server.api.open_requests import OpenRequests
from server.api.request_record import record_of
from server.api.service import Service
from server.errors import RequestNotFound


def requests_router(service: Service, open_requests: OpenRequests) -> APIRouter:
    """Return the route, bound to one worker's service and requests."""
    router = APIRouter()

    @router.delete("/v1/requests/{request_id:path}", summary="Cancel a running request by its id or x-request-id")
    async def cancel_request(request_id: str, request: Request) -> Response:
        key_hash = record_of(request.scope).key_hash
        is_here = open_requests.cancel(request_id, key_hash=key_hash)
        is_elsewhere = await service.supervisor.cancel(request_id, key_hash=key_hash)
        if not is_here and not is_elsewhere:
            raise RequestNotFound(f"No request with the id {request_id[:200]!r} is running.")
        body = msgspec.json.encode(CancelledRequest(request_id))
        return Response(body, media_type="application/json")

    return router
