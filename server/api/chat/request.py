"""prepare_chat: checks and encodes a parsed chat body: features, template, token ids, spec. Imports server only.

The chat route calls prepare_chat; routes of other APIs, which translate their bodies to a ChatBody, prepare_equivalent.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request

from engine.interface.errors import PromptTooLong
from server.api.app_state import AppState
from server.api.as_chat import ChatEquivalent, errors_in_client_fields, rename_fields
from server.api.chat.harmony_messages import harmony_messages
from server.api.chat.template_messages import shorten_call_ids, template_messages
from server.api.chat.thinking import ignored_in_thinking, template_kwargs, thinking_budget, unread_kwargs
from server.api.chat.tools import ToolPlan, check_tool_results, check_tools, plan_tools
from server.api.generation_spec import chat_spec, check_chat
from server.api.grammar_wait import checked_grammar
from server.api.ignored_fields import ignored_fields
from server.api.large_bodies import body_size, while_wanted, with_body
from server.api.limits import LIMITS
from server.api.prompt_pins import Retention, longest_breakpoint, longest_of
from server.api.reply_options import PreparedReply, reply_options
from server.api.request_record import record_of
from server.api.sampling_fields import ModelFacts
from server.api.schemas import ChatBody
from server.api.sse import ReplyHead
from server.generation.generation import CompletionStream
from server.generation.message_splitter import MessageSplitter
from server.structured_output.grammar_spec import ConstraintRequest, constraint_of
from server.structured_output.schema_check import check_keywords, checked_schema
from server.structured_output.tool_grammar import answer_grammar, check_grammar_size, tool_grammar
from server.text.parsers.base import ToolSpec
from server.text.parsers.detect import ChatFormat, make_parser
from server.text.parsers.reasoning import ReasoningPlace, reasoning_place
from server.text.template_sandbox import RenderTooLong, template_timeout
from server.text.tokenizer import CONTEXT, RenderedChat, Tokenizer

COUNTED = "The limit of what is counted or shown without generation"
_RENDER_WAIT_S = 30.0  # beside all that others render


class _Prompt(NamedTuple):
    token_ids: list[int]
    reasoning: ReasoningPlace


async def prepare_chat(
    app_state: AppState,
    body: ChatBody,
    request: Request,
    *,
    id_prefix: str = "chatcmpl-",
    shrinks_max_tokens: bool = False,
    field_names: Mapping[str, str] | None = None,
) -> PreparedReply:
    """Check and encode a chat. Raises ServiceErrors for every fault but those that the engine finds.

    `request`: its body has been read; its disconnect ends the wait for a grammar.
    `shrinks_max_tokens`: a max_tokens over the room in the context is lowered instead of refused.
    `field_names`: of ChatEquivalent, if the client used another API.
    """
    limits = app_state.limits()
    model = app_state.model_name(body.model)
    tokenizer, chat_format = app_state.tokenizer, app_state.tokenizer.chat_format
    plan = _checked_plan(body, chat_format)
    if field_names is None:  # other APIs join calls and results themselves
        check_tool_results(body)
    record = record_of(request.scope)
    ignored = await with_body(request, lambda: ignored_fields(body))
    body.prompt_cache_retention = await with_body(request, lambda: _retention(body))
    ignored += unread_kwargs(body, tokenizer, is_translated=field_names is not None)
    ignored += ignored_in_thinking(body, tokenizer) + app_state.drop_priority(body, record)
    headers = app_state.ignored_header(ignored)
    prompt = await _encode(app_state, body, plan, request, max_tokens=limits.max_model_len, limit=CONTEXT)
    record.model = model
    context = app_state.request_context(record)
    constraint = await with_body(request, lambda: _constraint_of(body, plan, tokenizer, prompt.reasoning))
    grammar = await checked_grammar(app_state.grammars, constraint, request, timeout_s=context.timeout_of(body.timeout))
    spec = chat_spec(
        body,
        prompt.token_ids,
        model=ModelFacts(limits, app_state.defaults, tokenizer),
        context=context,
        grammar=grammar,
        shrinks_max_tokens=shrinks_max_tokens,
        format_stops=tokenizer.tag_ids(chat_format.stops).values(),
    )
    spec = msgspec.structs.replace(
        spec,
        visible_ids=frozenset(tokenizer.tag_ids(chat_format.tags(has_tools=bool(plan.callable))).values()),
        grammar_param=constraint and rename_fields(constraint.param, field_names or {}),
        lora_index=app_state.lora_index(model),
        thinking=thinking_budget(body, tokenizer, prompt.reasoning, has_calls=bool(plan.callable)),
    )
    head = ReplyHead(f"{id_prefix}{secrets.token_hex(16)}", int(time.time()), model)
    generation = CompletionStream(
        spec,
        request_id=head.id,
        client=app_state.client,
        tokenizer=tokenizer,
        metrics=app_state.metrics,
        make_splitter=lambda index: _splitter(index, chat_format, plan, prompt.reasoning),
    )
    return PreparedReply(head, generation, reply_options(body, spec.params), headers, ignored)


async def prepare_equivalent(
    app_state: AppState,
    equivalent: ChatEquivalent,
    request: Request,
    *,
    id_prefix: str,
    shrinks_max_tokens: bool = False,
) -> PreparedReply:
    """Check and encode the chat of another API's request, as prepare_chat() does, with that API's names of fields."""
    names = equivalent.field_names
    with errors_in_client_fields(names):
        chat = await prepare_chat(
            app_state,
            equivalent.body,
            request,
            id_prefix=id_prefix,
            shrinks_max_tokens=shrinks_max_tokens,
            field_names=names,
        )
    ignored = [*equivalent.ignored, *(rename_fields(name, names) for name in chat.ignored)]
    return msgspec.structs.replace(chat, ignored=ignored, headers=app_state.ignored_header(ignored))


async def count_equivalent(
    app_state: AppState, equivalent: ChatEquivalent, request: Request
) -> tuple[int, dict[str, str]]:
    """Return the length in tokens of another API's prompt, and the header of the fields without effect on the answer.

    Raises ServiceErrors, with that API's names of fields.
    """
    names = equivalent.field_names
    with errors_in_client_fields(names):
        num_tokens = len(await encode_chat(app_state, equivalent.body, request))
        ignored = await with_body(request, lambda: ignored_fields(equivalent.body))
        ignored += unread_kwargs(equivalent.body, app_state.tokenizer, is_translated=True)
    return num_tokens, app_state.ignored_header(
        [*equivalent.ignored, *(rename_fields(name, names) for name in ignored)]
    )


async def encode_chat(app_state: AppState, body: ChatBody, request: Request) -> list[int]:
    """Return the token ids of a chat's prompt, which may exceed the context. Raises ServiceErrors."""
    plan = _checked_plan(body, app_state.tokenizer.chat_format)
    most = LIMITS.counted_tokens_of(app_state.limits().max_model_len)
    prompt = await _encode(app_state, body, plan, request, max_tokens=most, limit=COUNTED)
    return check_counted(prompt.token_ids, most, param="messages")


def check_counted(token_ids: list[int], most: int, *, param: str) -> list[int]:
    """Return tokens that are counted or shown without generation. Raises PromptTooLong for more than `most`."""
    if len(token_ids) > most:
        raise PromptTooLong(f"{COUNTED} is {most} tokens, but the prompt has {len(token_ids)}.", param=param)
    return token_ids


def _retention(body: ChatBody) -> Retention | None:
    """Return how long the prompt stays in the prefix cache, by all fields that say so. Raises UnsupportedFeature."""
    marked = longest_breakpoint(body.prompt_cache_options, [message.content for message in body.messages])
    return longest_of(body.prompt_cache_retention, marked)


def _checked_plan(body: ChatBody, chat_format: ChatFormat) -> ToolPlan:
    check_chat(body)
    plan = plan_tools(body)
    check_tools(plan, chat_format)
    _check_strict(body)
    return plan


def _check_strict(body: ChatBody) -> None:
    """Refuse keywords that JSON Schema does not have in the schemas of strict tools, callable or not."""
    strict = {i: tool.function.parameters for i, tool in enumerate(body.tools or ()) if tool.function.strict}
    check_grammar_size(sum(len(msgspec.json.encode(schema)) for schema in strict.values()))
    for i, schema in strict.items():
        if schema is not None:
            check_keywords(schema, f"tools[{i}].function.parameters")


def _splitter(index: int, chat_format: ChatFormat, plan: ToolPlan, reasoning: ReasoningPlace) -> MessageSplitter | None:
    parser = make_parser(chat_format, tools=plan.callable, is_reasoning=reasoning == "open")
    if parser is None:
        return None
    return MessageSplitter(index, parser, max_calls=None if plan.is_parallel else 1, must_call=plan.must_call)


def _constraint_of(
    body: ChatBody, plan: ToolPlan, tokenizer: Tokenizer, reasoning: ReasoningPlace
) -> ConstraintRequest | None:
    """Return the constraint of the answer: a forced tool call, else the body's format, or a call in its place."""
    chat_format = tokenizer.chat_format
    ids = tokenizer.tag_ids(chat_format.tags(has_tools=bool(plan.callable)))
    constraint = constraint_of(body.response_format, body.structured_outputs)
    if constraint is None and not plan.must_call:
        return None
    texts = [] if plan.must_call or constraint is None else [constraint.spec]
    calls = None
    if plan.callable:
        check_grammar_size(_schemas_size(plan.callable))  # before the work on them
        calls = tool_grammar(_enforced(plan, body), chat_format, is_parallel=plan.is_parallel, tag_ids=ids)
        check_grammar_size(len(calls.source.encode()))
    param = "tools" if constraint is None or plan.must_call else constraint.param
    return ConstraintRequest(answer_grammar(texts, calls, chat_format, reasoning, tag_ids=ids), param)


def _schemas_size(tools: Iterable[ToolSpec]) -> int:
    return sum(len(msgspec.json.encode(tool.parameters)) for tool in tools)


def _enforced(plan: ToolPlan, body: ChatBody) -> list[ToolSpec]:
    """Return the callable tools with the schemas that a grammar enforces. Raises GrammarError."""
    places = {tool.function.name: f"tools[{i}].function.parameters" for i, tool in enumerate(body.tools or ())}
    tools = []
    for tool in plan.callable:
        schema = checked_schema(tool.parameters, places[tool.name], is_strict=tool.is_strict)
        assert isinstance(schema, dict)  # as the parameters are
        tools.append(msgspec.structs.replace(tool, parameters=schema))
    return tools


async def _encode(
    app_state: AppState, body: ChatBody, plan: ToolPlan, request: Request, *, max_tokens: int, limit: str
) -> _Prompt:
    """Render and encode, in threads what is not small.

    Raises PromptTooLong for more than about twice max_tokens, named `limit`.
    """
    tokenizer = app_state.tokenizer
    num_bytes = body_size(request)

    def encode(rendered: RenderedChat) -> list[int]:
        tokenizer.check_length(rendered.text, max_tokens=max_tokens, param="messages", limit=limit)
        return tokenizer.encode_chat(rendered)

    rendered, place, ids = await while_wanted(
        request, _render(app_state, body, plan, num_bytes=num_bytes, encode=encode)
    )
    if ids is None:
        ids = await while_wanted(request, app_state.work.run(len(rendered.text), lambda: encode(rendered)))
    return _Prompt(ids, place)


async def _render(
    app_state: AppState, body: ChatBody, plan: ToolPlan, *, num_bytes: int, encode: Callable[[RenderedChat], list[int]]
) -> tuple[RenderedChat, ReasoningPlace, list[int] | None]:
    """Render, and encode a text that is not large, too; of others the ids are None.

    A small chat is rendered at once, unless that proves to take long. Else it is done in a thread: the renderer checks
    its deadline itself; the wait covers code that cannot.
    """
    tokenizer = app_state.tokenizer
    template = tokenizer.chat_template
    knows_developer = template is not None and "developer" in template.source
    begun_s: float | None = None  # None while it waits for a free thread: that time is no render time

    def render(*, is_brief: bool = False) -> tuple[RenderedChat, ReasoningPlace, list[int] | None]:
        nonlocal begun_s
        messages = template_messages(body, knows_developer=knows_developer)
        if tokenizer.chat_format.is_harmony:
            messages = harmony_messages(messages)
        if tokenizer.chat_format.tools in ("mistral", "mistral_args"):
            shorten_call_ids(messages)
        begun_s = time.monotonic()
        rendered = tokenizer.render_chat(
            messages,
            tools=plan.shown,
            add_generation_prompt=_adds_generation_prompt(body),
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=template_kwargs(body, tokenizer.chat_format),
            is_brief=is_brief,
        )
        written = str(messages[-1].get("content", "")) if body.continue_final_message else None
        place = reasoning_place(tokenizer.chat_format.reasoning, rendered.text, continued=written)
        most = LIMITS.brief_bytes if is_brief else LIMITS.small_body_bytes
        return rendered, place, encode(rendered) if len(rendered.text) <= most else None

    if app_state.work.is_brief(num_bytes):
        try:
            return render(is_brief=True)
        except RenderTooLong:
            app_state.work.note_long()
    work = asyncio.create_task(app_state.work.run(num_bytes, render))
    work.add_done_callback(_forget)  # also if the request is cancelled meanwhile
    try:
        while not work.done():
            taken_s = time.monotonic() - begun_s if begun_s is not None else 0.0
            if taken_s >= _RENDER_WAIT_S:
                raise template_timeout(f"{_RENDER_WAIT_S:g} s with the work of other requests")
            await asyncio.wait({work}, timeout=_RENDER_WAIT_S - taken_s)
        return work.result()
    finally:
        work.cancel()  # a render that has not begun never does


def _forget(work: asyncio.Task[Any]) -> None:
    """Retrieve the result of an abandoned render, so that asyncio does not report it as lost."""
    if not work.cancelled():
        work.exception()


def _adds_generation_prompt(body: ChatBody) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt
