"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from server.api.chat.request import prepare_chat
from server.api.chat.writer import ChatWriter
from server.api.schemas import ChatBody, parse_body
from server.api.service import Service
from server.api.sse import DataEvents
from server.http.routes.reply import answer
from server.http.routes.request_body import read_json


def chat_router(service: Service) -> APIRouter:
    """Return the route, bound to one worker's service."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Chat completion", openapi_extra={"x-body": ChatBody.__name__})
    async def create_chat_completion(request: Request) -> Response:
        service.check_room()  # before the body is read
        body = parse_body(ChatBody, await read_json(request))
        chat = await prepare_chat(service, body, request)
        writer = ChatWriter(chat.head, chat.options, generation=chat.generation, tokenizer=service.tokenizer)
        return await answer(
            service,
            request,
            generation=chat.generation,
            writer=DataEvents(writer),
            is_stream=chat.options.is_stream,
            headers=chat.headers,
        )

    return router
