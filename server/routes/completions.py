"""POST /v1/completions."""

import asyncio
import secrets
import time

from fastapi import APIRouter, Request, Response

from engine.protocol import EngineReady
from server.access import record_of
from server.body import read_json
from server.generation import Generation
from server.ignored import ignored_fields
from server.routes.answer import answer
from server.schemas import CompletionBody, parse_body
from server.service import Service
from server.sse import DataEvents
from server.tokenizer import Tokenizer
from server.validate import GenerationSpec, check_completion, completion_spec, reply_options
from server.writers import ReplyHead, TextWriter


def completions_router(service: Service) -> APIRouter:
    """Return the route, bound to one worker's service."""
    router = APIRouter()

    @router.post("/v1/completions", summary="Text completion", openapi_extra={"x-body": CompletionBody.__name__})
    async def create_completion(request: Request) -> Response:
        limits = service.limits()
        body = parse_body(CompletionBody, await read_json(request))
        model = service.model_name(body.model)
        check_completion(body)
        headers = service.ignored_header(ignored_fields(body))
        prompts = body.prompt
        if isinstance(prompts[0], str):
            prompts = await asyncio.to_thread(_encode, service.tokenizer, prompts, limits)
        moment = service.moment(record_of(request.scope))
        spec = completion_spec(body, prompts, limits=limits, defaults=service.defaults, moment=moment)
        head = ReplyHead(f"cmpl-{secrets.token_hex(16)}", int(time.time()), model)
        generation = Generation(
            spec, request_id=head.id, client=service.client, tokenizer=service.tokenizer, metrics=service.metrics
        )
        options = reply_options(body, spec.params)
        echo = _echo_texts(body, spec, service.tokenizer) if body.echo else None
        writer = TextWriter(head, options, generation=generation, tokenizer=service.tokenizer, echo=echo)
        return await answer(
            service,
            request,
            generation=generation,
            writer=DataEvents(writer),
            is_stream=options.is_stream,
            headers=headers,
        )

    return router


def _encode(tokenizer: Tokenizer, prompts: list[str], limits: EngineReady) -> list[list[int]]:
    for prompt in prompts:
        tokenizer.check_length(prompt, max_model_len=limits.max_model_len, param="prompt")
    return [tokenizer.encode(prompt) for prompt in prompts]


def _echo_texts(body: CompletionBody, spec: GenerationSpec, tokenizer: Tokenizer) -> list[str]:
    if isinstance(body.prompt[0], str):
        return body.prompt
    skip = spec.skip_special_tokens
    return [tokenizer.decode(list(prompt), skip_special_tokens=skip) for prompt in spec.prompts]
