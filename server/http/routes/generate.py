"""Routes POST /v1/chat/completions and POST /v1/completions."""

from fastapi import Request, Response

from server.api.app_state import AppState
from server.api.chat.request import prepare_chat
from server.api.chat.writer import ChatWriter
from server.api.completions.request import prepare_completion
from server.api.completions.writer import TextWriter
from server.api.large_bodies import with_body
from server.api.objects import ChatChunk, ChatCompletion, TextCompletion
from server.api.schemas import ChatBody, CompletionBody
from server.generation.spec import GenerationSpec
from server.http.routes.api_route import ApiRoute
from server.http.routes.reply import answer
from server.http.routes.request_body import read_body
from server.text.tokenizer import Tokenizer


def chat_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the route, bound to one worker's state."""

    async def create_chat_completion(request: Request) -> Response:
        await app_state.check_room()  # before the body is read
        body = await read_body(request, ChatBody)
        chat = await prepare_chat(app_state, body, request)
        return await answer(app_state, request, chat, ChatWriter(chat, tokenizer=app_state.tokenizer))

    return [
        ApiRoute(
            path="/v1/chat/completions",
            handler=create_chat_completion,
            summary="Chat completion",
            body=ChatBody,
            example={"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "max_tokens": 64},
            answer=ChatCompletion,
            stream=ChatChunk,
        )
    ]


def completions_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the route, bound to one worker's state."""

    async def create_completion(request: Request) -> Response:
        await app_state.check_room()  # before the body is read
        body = await read_body(request, CompletionBody)
        completion = await prepare_completion(app_state, body, request)
        spec = completion.generation.spec
        echo = await with_body(request, lambda: _echo_texts(body, spec, app_state.tokenizer)) if body.echo else None
        writer = TextWriter(completion, tokenizer=app_state.tokenizer, echo=echo)
        return await answer(app_state, request, completion, writer)

    return [
        ApiRoute(
            path="/v1/completions",
            handler=create_completion,
            summary="Text completion",
            body=CompletionBody,
            example={"prompt": "The capital of Peru is", "max_tokens": 16},
            answer=TextCompletion,
            stream=TextCompletion,
        )
    ]


def _echo_texts(body: CompletionBody, spec: GenerationSpec, tokenizer: Tokenizer) -> list[str]:
    if isinstance(body.prompt[0], str):
        return body.prompt
    skip = spec.skip_special_tokens
    return [tokenizer.decode(list(prompt), skip_special_tokens=skip) for prompt in spec.prompts]
