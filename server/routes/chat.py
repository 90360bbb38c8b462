"""POST /v1/chat/completions."""

import asyncio
import secrets
import threading
import time

from fastapi import APIRouter, Request, Response

from engine.protocol import EngineReady
from server.access import record_of
from server.body import read_json
from server.chat_template import template_timeout
from server.generation import Generation
from server.ignored import ignored_fields
from server.messages import template_messages
from server.routes.answer import answer
from server.schemas import ChatBody, parse_body
from server.service import Service
from server.structured import asked_grammar
from server.tokenizer import TEMPLATE_DEADLINE_S
from server.validate import chat_spec, check_chat, reply_options
from server.writers import ChatWriter, ReplyHead

_RENDER_GRACE_S = 0.5


def chat_router(service: Service) -> APIRouter:
    """Return the route, bound to one worker's service."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Chat completion", openapi_extra={"x-body": ChatBody.__name__})
    async def create_chat_completion(request: Request) -> Response:
        limits = service.limits()
        body = parse_body(ChatBody, await read_json(request))
        model = service.model_name(body.model)
        check_chat(body)
        headers = service.ignored_header(ignored_fields(body))
        grammar = await service.grammars.checked(asked_grammar(body.response_format, body.structured_outputs))
        token_ids = await _encode(service, body, limits)
        moment = service.moment(record_of(request.scope))
        spec = chat_spec(body, token_ids, limits=limits, defaults=service.defaults, moment=moment, grammar=grammar)
        head = ReplyHead(f"chatcmpl-{secrets.token_hex(16)}", int(time.time()), model)
        generation = Generation(
            spec, request_id=head.id, client=service.client, tokenizer=service.tokenizer, metrics=service.metrics
        )
        options = reply_options(body, spec.params)
        writer = ChatWriter(head, options, generation=generation, tokenizer=service.tokenizer)
        return await answer(
            service, request, generation=generation, writer=writer, is_stream=options.is_stream, headers=headers
        )

    return router


async def _encode(service: Service, body: ChatBody, limits: EngineReady) -> list[int]:
    """Render and encode in one thread. The render checks its deadline itself; the wait here is for one that cannot."""
    tokenizer = service.tokenizer
    template = tokenizer.chat_template
    messages = template_messages(body, knows_developer=template is not None and "developer" in template.source)
    is_rendered = threading.Event()

    def render_and_encode() -> list[int]:
        rendered = tokenizer.render_chat(
            messages,
            add_generation_prompt=_adds_generation_prompt(body),
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
        )
        is_rendered.set()
        tokenizer.check_length(rendered.text, max_model_len=limits.max_model_len, param="messages")
        return tokenizer.encode_chat(rendered)

    work = asyncio.create_task(asyncio.to_thread(render_and_encode))
    done, _ = await asyncio.wait({work}, timeout=TEMPLATE_DEADLINE_S + _RENDER_GRACE_S)
    if not done and not is_rendered.is_set():
        work.add_done_callback(_forget)
        raise template_timeout()
    return await work


def _forget(work: asyncio.Task[list[int]]) -> None:
    """Take the result of a render that nobody waits for, so that asyncio does not report it as lost."""
    if not work.cancelled():
        work.exception()


def _adds_generation_prompt(body: ChatBody) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt
