"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from fastapi import Request, Response

from server.api.app_state import AppState
from server.api.chat.request import count_equivalent, prepare_equivalent
from server.api.large_bodies import with_body
from server.api.messages.objects import Message, TokenCount
from server.api.messages.request import translate_count, translate_messages
from server.api.messages.schema import CountTokensBody, MessagesBody
from server.api.messages.writer import MessagesWriter
from server.api.request_record import record_of
from server.http.routes.api_route import ApiRoute
from server.http.routes.reply import answer, json_reply
from server.http.routes.request_body import read_body


def messages_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the routes, bound to one worker's state."""

    async def create_message(request: Request) -> Response:
        await app_state.check_room()  # before the body is read
        body = await read_body(request, MessagesBody)
        equivalent = await with_body(request, lambda: translate_messages(body))
        chat = await prepare_equivalent(app_state, equivalent, request, id_prefix="msg_", shrinks_max_tokens=True)
        writer = MessagesWriter(
            chat.head,
            generation=chat.generation,
            max_tokens=body.max_tokens,
            omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
        )
        chat.headers["request-id"] = record_of(request.scope).request_id
        return await answer(app_state, request, chat, writer)

    async def count_tokens(request: Request) -> Response:
        await app_state.wait_served()
        body = await read_body(request, CountTokensBody)
        app_state.model_name(body.model)
        equivalent = await with_body(request, lambda: translate_count(body))
        num_tokens, headers = await count_equivalent(app_state, equivalent, request)
        return json_reply(TokenCount(num_tokens), {**headers, "request-id": record_of(request.scope).request_id})

    return [
        ApiRoute(
            path="/v1/messages",
            handler=create_message,
            summary="Message",
            body=MessagesBody,
            example={"max_tokens": 64, "messages": [{"role": "user", "content": "What is the capital of Peru?"}]},
            answer=Message,
            stream="Anthropic's named events, from message_start to message_stop",
        ),
        ApiRoute(
            path="/v1/messages/count_tokens",
            handler=count_tokens,
            summary="Count a prompt",
            body=CountTokensBody,
            example={"messages": [{"role": "user", "content": "What is the capital of Peru?"}]},
            answer=TokenCount,
        ),
    ]
