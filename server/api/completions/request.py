"""prepare_completion: from a parsed completion body to a generation: checks, token ids, spec. Imports server only."""

import secrets
import time

from starlette.requests import Request

from server.api.app_state import AppState
from server.api.generation_spec import check_completion, completion_spec
from server.api.grammar_wait import checked_grammar
from server.api.ignored_fields import ignored_fields
from server.api.large_bodies import body_size, while_wanted, with_body
from server.api.reply_options import PreparedReply, reply_options
from server.api.request_record import record_of
from server.api.sampling_fields import ModelFacts
from server.api.schemas import CompletionBody
from server.api.sse import ReplyHead
from server.generation.generation import CompletionStream
from server.structured_output.grammar_spec import constraint_of


async def prepare_completion(app_state: AppState, body: CompletionBody, request: Request) -> PreparedReply:
    """Check and encode a completion. Raises ServiceErrors. `request`: as in prepare_chat."""
    limits = app_state.limits()
    model = app_state.model_name(body.model)
    check_completion(body)
    record = record_of(request.scope)
    ignored = ignored_fields(body) + app_state.drop_priority(body, record)
    headers = app_state.ignored_header(ignored)
    record.model = model
    context = app_state.request_context(record)
    constraint = await with_body(request, lambda: constraint_of(body.response_format, body.structured_outputs))
    grammar = await checked_grammar(app_state.grammars, constraint, request, timeout_s=context.timeout_of(body.timeout))
    prompts = body.prompt
    if isinstance(prompts[0], str):
        prompts = await while_wanted(
            request, app_state.encode_texts(prompts, num_bytes=body_size(request), param="prompt")
        )
    facts = ModelFacts(limits, app_state.defaults, app_state.tokenizer)
    spec = await with_body(
        request,
        lambda: completion_spec(
            body,
            prompts,
            model=facts,
            context=context,
            grammar=grammar,
            grammar_param=constraint and constraint.param,
            lora_index=app_state.lora_index(model),
        ),
    )
    head = ReplyHead(f"cmpl-{secrets.token_hex(16)}", int(time.time()), model)
    generation = CompletionStream(
        spec, request_id=head.id, client=app_state.client, tokenizer=app_state.tokenizer, metrics=app_state.metrics
    )
    return PreparedReply(head, generation, reply_options(body, spec.params), headers, ignored)
