"""From a parsed chat body to a generation that can be run: checks, template, token ids, spec. Imports server only.

The chat route calls prepare_chat, and so do the routes of other APIs that make a ChatBody of their own bodies.
"""

import asyncio
import secrets
import threading
import time

import msgspec

from engine.protocol import EngineReady
from server.access import RequestRecord
from server.chat_generation import ChatGeneration
from server.chat_template import template_timeout
from server.generation import Generation
from server.ignored import ignored_fields
from server.messages import template_messages
from server.schemas import ChatBody
from server.service import Service
from server.tokenizer import TEMPLATE_DEADLINE_S
from server.validate import ReplyOptions, chat_spec, check_chat, reply_options
from server.writers import ReplyHead

_RENDER_GRACE_S = 0.5


class PreparedChat(msgspec.Struct, frozen=True):
    """A checked chat request, not begun yet."""

    head: ReplyHead
    generation: ChatGeneration
    options: ReplyOptions
    headers: dict[str, str]  # of the answer: names what was ignored


async def prepare_chat(service: Service, body: ChatBody, record: RequestRecord) -> PreparedChat:
    """Check and encode a chat. Raises ServiceErrors: what is wrong with a request is known here, but for the engine's
    own limits.
    """
    limits = service.limits()
    model = service.model_name(body.model)
    check_chat(body)
    headers = service.ignored_header(ignored_fields(body))
    token_ids = await _encode(service, body, limits)
    spec = chat_spec(body, token_ids, limits=limits, defaults=service.defaults, moment=service.moment(record))
    head = ReplyHead(f"chatcmpl-{secrets.token_hex(16)}", int(time.time()), model)
    generation = Generation(
        spec, request_id=head.id, client=service.client, tokenizer=service.tokenizer, metrics=service.metrics
    )
    return PreparedChat(head, ChatGeneration(generation), reply_options(body, spec.params), headers)


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
