"""Routes of /v1/responses: POST, and a 404 with a reason for requests that need stored answers."""

from fastapi import Request, Response

from server.api.app_state import AppState
from server.api.chat.request import count_equivalent, prepare_equivalent
from server.api.chat.writer import token_logprobs
from server.api.large_bodies import with_body
from server.api.objects import ChatTokenLogprob
from server.api.reply_options import PreparedReply
from server.api.responses import objects
from server.api.responses.request import (
    SEALED_REASONING,
    asks_for_summary,
    custom_names_of,
    echo_of,
    translate_input_tokens,
    translate_responses,
)
from server.api.responses.schema import InputTokensBody, ResponsesBody
from server.api.responses.writer import Logprobs, ResponsesWriter
from server.errors import NotFound
from server.generation.events import TextDelta
from server.http.routes.api_route import ApiRoute
from server.http.routes.reply import answer, json_reply
from server.http.routes.request_body import read_body
from server.text.tokenizer import Tokenizer


def responses_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the routes, bound to one worker's state."""

    async def create_response(request: Request) -> Response:
        await app_state.check_room()  # before the body is read
        body = await read_body(request, ResponsesBody)
        equivalent = await with_body(request, lambda: translate_responses(body))
        chat = await prepare_equivalent(app_state, equivalent, request, id_prefix="resp_")
        writer = ResponsesWriter(
            chat.head,
            echo_of(body),
            generation=chat.generation,
            logprobs=_logprobs(chat, app_state.tokenizer),
            is_sealed=SEALED_REASONING in (body.include or ()),
            is_summary=asks_for_summary(body),
            custom_names=custom_names_of(body),
        )
        return await answer(app_state, request, chat, writer)

    async def count_input_tokens(request: Request) -> Response:
        await app_state.wait_served()
        body = await read_body(request, InputTokensBody)
        app_state.model_name(body.model)
        equivalent = await with_body(request, lambda: translate_input_tokens(body))
        num_tokens, headers = await count_equivalent(app_state, equivalent, request)
        return json_reply(objects.InputTokens(num_tokens), headers)

    async def stored_response(path: str) -> Response:
        if not path:
            raise NotFound("There is no route /v1/responses/: it is /v1/responses on this server.")
        if path == "compact":
            raise NotFound("There is no route /v1/responses/compact: conversations are not compacted here.")
        raise NotFound(f"There is no response {path[:100]!r}: this server stores none, as if each had store=false.")

    return [
        ApiRoute(
            path="/v1/responses",
            handler=create_response,
            summary="Response",
            body=ResponsesBody,
            example={"input": "What is the capital of Peru?", "max_output_tokens": 64},
            answer=objects.Response,
            stream="OpenAI's named events, from response.created to response.completed",
        ),
        ApiRoute(
            path="/v1/responses/input_tokens",
            handler=count_input_tokens,
            summary="Count the prompt of a response",
            body=InputTokensBody,
            example={"input": "What is the capital of Peru?"},
            answer=objects.InputTokens,
        ),
        ApiRoute(methods=("GET", "POST", "DELETE"), path="/v1/responses/{path:path}", handler=stored_response),
    ]


def _logprobs(chat: PreparedReply, tokenizer: Tokenizer) -> Logprobs | None:
    num_top = chat.options.logprobs
    if num_top is None:
        return None

    def logprobs(event: TextDelta) -> list[ChatTokenLogprob]:
        return token_logprobs(event.token_ids, event.logprobs or (), tokenizer=tokenizer, num_top=num_top)

    return logprobs
