"""Routes POST /tokenize, /detokenize and the render routes: the tokens of a prompt, without generation.

GET /tokenizer_info describes the tokenizer itself.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from fastapi import Request, Response

from engine.interface.errors import InvalidParameter
from engine.interface.protocol import EngineReady
from server.api.app_state import AppState
from server.api.as_chat import named_extras
from server.api.chat.request import COUNTED, check_counted, encode_chat, prepare_chat
from server.api.chat.thinking import unread_kwargs
from server.api.chat.tools import check_tool_results
from server.api.completions.request import prepare_completion
from server.api.ignored_fields import ignored_fields
from server.api.large_bodies import while_wanted, with_body
from server.api.limits import LIMITS
from server.api.objects import AddedToken, Detokenized, Rendered, Tokenized, TokenizerInfo, TokenPiece
from server.api.sampling_fields import check_ids
from server.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from server.api.strict_json import parse_body
from server.http.routes.api_route import ApiRoute
from server.http.routes.reply import json_reply
from server.http.routes.request_body import read_body
from server.text.generation_defaults import read_json
from server.text.tokenizer import Tokenizer

_BYTES_PER_TOKEN = 16  # of an answer, at least
_NO_LENGTH = 10**12  # transformers writes 10**30 for a tokenizer without a limit


def tokens_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the routes, bound to one worker's state."""

    async def tokenize(request: Request) -> Response:
        limits = await app_state.wait_served()
        body = await read_body(request, TokenizeBody)
        app_state.model_name(body.model)
        ignored = named_extras(body.model_extra or {}, known=set(), at="")
        _check_tokenize(body)
        if body.messages is not None:
            chat = await with_body(request, lambda: parse_body(ChatBody, body.chat_fields()))
            check_tool_results(chat)
            token_ids = await encode_chat(app_state, chat, request)
            ignored += await with_body(request, lambda: ignored_fields(chat))
            ignored += unread_kwargs(chat, app_state.tokenizer)
        else:
            ignored += named_extras(body.chat_fields(), known={"model"}, at="")
            encode = partial(_encode, app_state.tokenizer, body, LIMITS.counted_tokens_of(limits.max_model_len))
            size = len(body.content or body.prompt or "")
            token_ids = await while_wanted(request, app_state.work.run(size, encode))
        headers = app_state.ignored_header(ignored)
        write = partial(_tokenized, body, token_ids, app_state.tokenizer, limits.max_model_len)
        answer = await app_state.work.run(_BYTES_PER_TOKEN * len(token_ids), write)
        return Response(answer, media_type="application/json", headers=headers)

    async def detokenize(request: Request) -> Response:
        limits = await app_state.wait_served()
        body = await read_body(request, DetokenizeBody)
        app_state.model_name(body.model)
        headers = app_state.ignored_header(named_extras(body.model_extra or {}, known=set(), at=""))
        answer = await with_body(request, lambda: _detokenized(body, app_state.tokenizer, limits))
        return Response(answer, media_type="application/json", headers=headers)

    return [
        ApiRoute(
            path="/tokenize",
            handler=tokenize,
            summary="Tokens of a text or a chat",
            body=TokenizeBody,
            example={"prompt": "What is the capital of Peru?", "return_token_strs": True},
        ),
        ApiRoute(
            path="/detokenize",
            handler=detokenize,
            summary="Text of tokens",
            body=DetokenizeBody,
            example={"tokens": [72, 101, 108]},
            answer=Detokenized,
        ),
    ]


def tokenizer_info_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the route, bound to one worker's state. Its answer never changes, so it is made once."""
    tokenizer = app_state.tokenizer
    config = read_json(Path(app_state.config.model) / "tokenizer_config.json")
    length = config.get("model_max_length")
    info = TokenizerInfo(
        **tokenizer.named_tokens,
        tokenizer_class=str(config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        model_max_length=length if isinstance(length, int) and length < _NO_LENGTH else None,
        chat_template=None if tokenizer.chat_template is None else tokenizer.chat_template.source,
        added_tokens_decoder={
            str(id_): AddedToken(token.content, token.special) for id_, token in tokenizer.added_tokens().items()
        },
    )
    body = msgspec.json.encode(info)

    async def tokenizer_info() -> Response:
        return Response(body, media_type="application/json")

    return [
        ApiRoute(
            path="/tokenizer_info",
            handler=tokenizer_info,
            summary="Special tokens and chat template of the tokenizer",
            answer=TokenizerInfo,
        )
    ]


def render_routes(app_state: AppState) -> list[ApiRoute]:
    """Return the routes that show prompts, bound to one worker's state."""

    async def render_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        chat = await prepare_chat(app_state, body, request)
        (prompt,) = chat.generation.spec.prompts
        rendered = await _rendered(app_state, chat.head.id, chat.head.model, [prompt])
        return json_reply(rendered[0], chat.headers)

    async def render_completion(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        completion = await prepare_completion(app_state, body, request)
        head, prompts = completion.head, completion.generation.spec.prompts
        return json_reply(await _rendered(app_state, head.id, head.model, prompts), completion.headers)

    return [
        ApiRoute(
            path="/v1/chat/completions/render",
            handler=render_chat_completion,
            summary="The prompt of a chat completion, in tokens and as text",
            body=ChatBody,
            example={"messages": [{"role": "user", "content": "What is the capital of Peru?"}]},
            answer=Rendered,
        ),
        ApiRoute(
            path="/v1/completions/render",
            handler=render_completion,
            summary="The prompts of a completion, in tokens and as text",
            body=CompletionBody,
            example={"prompt": "The capital of Peru is"},
            answer=Rendered,
            is_list=True,
        ),
    ]


def _check_tokenize(body: TokenizeBody) -> None:
    given = {"prompt": body.prompt, "content": body.content, "messages": body.messages}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        shown = " and ".join(names) or "none of them"
        raise InvalidParameter(
            f"One of prompt, content and messages is needed, got {shown}.", param=(names or [""])[-1] or "prompt"
        )
    if body.messages is not None and (body.add_special_tokens or body.add_special):
        name = "add_special_tokens" if body.add_special_tokens else "add_special"
        raise InvalidParameter(f"{name} is for a prompt: a chat's template writes its own special tokens.", param=name)


def _encode(tokenizer: Tokenizer, body: TokenizeBody, most: int) -> list[int]:
    name, text = ("prompt", body.prompt or "") if body.content is None else ("content", body.content)
    is_special = (
        body.add_special_tokens is not False if name == "prompt" else body.add_special or body.add_special_tokens
    )
    tokenizer.check_length(text, max_tokens=most, param=name, limit=COUNTED)
    return check_counted(tokenizer.encode(text, add_special_tokens=bool(is_special)), most, param=name)


def _tokenized(body: TokenizeBody, token_ids: list[int], tokenizer: Tokenizer, max_model_len: int) -> bytes:
    names = [tokenizer.token_name(token_id) for token_id in token_ids] if body.return_token_strs else None
    tokens: list[int] | list[TokenPiece] = token_ids
    if body.with_pieces:
        tokens = [TokenPiece(token_id, _piece(tokenizer.token_bytes(token_id))) for token_id in token_ids]
    answer = Tokenized(tokens=tokens, count=len(token_ids), max_model_len=max_model_len, token_strs=names)
    return msgspec.json.encode(answer)


def _detokenized(body: DetokenizeBody, tokenizer: Tokenizer, limits: EngineReady) -> bytes:
    check_ids(body.tokens, "tokens", limits)
    return msgspec.json.encode(Detokenized(tokenizer.decode(body.tokens, skip_special_tokens=False)))


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where it is part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _rendered(
    app_state: AppState, request_id: str, model: str, prompts: Sequence[Sequence[int]]
) -> list[Rendered]:
    def decode() -> list[Rendered]:
        texts = [app_state.tokenizer.decode(list(prompt), skip_special_tokens=False) for prompt in prompts]
        return [
            Rendered(request_id=request_id, model=model, token_ids=list(prompt), prompt=text)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    return await app_state.work.run(_BYTES_PER_TOKEN * sum(map(len, prompts)), decode)
