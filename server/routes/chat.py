"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from server.body import read_json
from server.chat_request import prepare_chat
from server.chat_writer import ChatWriter
from server.routes.answer import answer
from server.schemas import ChatBody, parse_body
from server.service import Service
from server.sse import DataEvents


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
