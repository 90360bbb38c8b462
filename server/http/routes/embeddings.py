"""POST /v1/embeddings."""

import asyncio

from fastapi import Request, Response

from server.api.app_state import AppState
from server.api.embeddings.request import prepare_embeddings
from server.api.embeddings.run import EmbeddingList, encode_answer
from server.api.embeddings.schema import EmbeddingBody
from server.api.large_bodies import release_body
from server.api.rate_headers import rate_headers
from server.api.request_record import record_of
from server.api.sse import run_while_connected
from server.http.routes.api_route import ApiRoute
from server.http.routes.request_body import read_body


def embeddings_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the route, bound to one worker's state."""

    async def create_embeddings(request: Request) -> Response:
        await app_state.check_queue()  # before the body is read
        app_state.embedding_model()
        body = await read_body(request, EmbeddingBody)
        prepared = await prepare_embeddings(app_state, body, request)
        release_body(request)
        run, record = prepared.run, record_of(request.scope)
        record.stats, record.cancel, record.answer_id = run.stats, run.cancel, run.request_id
        if record.is_cancelled:  # while its inputs were encoded
            run.cancel()
        await run_while_connected(request.receive, run.embed_all())
        # in a thread, since a large answer takes seconds to write: other requests' streams go on meanwhile
        answer = await asyncio.to_thread(encode_answer, run, model=prepared.model, is_base64=prepared.is_base64)
        headers = {**prepared.headers, **rate_headers(run.stats().rates)}
        return Response(answer, media_type="application/json", headers=headers)

    return [
        ApiRoute(
            path="/v1/embeddings",
            handler=create_embeddings,
            summary="Embeddings",
            body=EmbeddingBody,
            example={"input": ["A quire is a gathering of leaves.", "A cache holds keys and values."]},
            answer=EmbeddingList,
        )
    ]
