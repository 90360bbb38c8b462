"""The reasoning that a chat request asks for: variables of the template, and a limit that the engine enforces. Pure.

Of other variables, chat_template_kwargs, it says which the template reads.

reasoning_effort goes to a template that reads it. For any other model that reasons it is a limit of tokens, and the
switch of the template, if that has one. thinking_token_budget is a limit of its own and goes before the effort's.
"""

from typing import Any

import msgspec

from engine.interface.protocol import ThinkingBudget
from server.api.chat.harmony_messages import harmony_effort
from server.api.schemas import ChatBody
from server.text.parsers import harmony
from server.text.parsers.detect import THINKING_SWITCHES, ChatFormat
from server.text.parsers.reasoning import ReasoningPlace
from server.text.tokenizer import Tokenizer

# Of reasoning; the efforts beyond medium have none
EFFORT_TOKENS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192}


def template_kwargs(body: ChatBody, chat_format: ChatFormat) -> dict[str, Any] | None:
    """Return the template's variables for reasoning; chat_template_kwargs take precedence."""
    kwargs: dict[str, Any] = {}
    effort, limit = body.reasoning_effort, _limit(body, chat_format)
    if effort is not None:
        if chat_format.thinking_switch is not None:
            kwargs[chat_format.thinking_switch] = effort != "none"
        if chat_format.takes_effort:
            kwargs["reasoning_effort"] = harmony_effort(effort) if chat_format.is_harmony else effort
    if limit is not None and chat_format.takes_budget:
        kwargs["thinking_budget"] = limit
    return kwargs | (body.chat_template_kwargs or {}) or None


def unread_kwargs(body: ChatBody, tokenizer: Tokenizer, *, is_translated: bool = False) -> list[str]:
    """Return the chat_template_kwargs that no template of the model reads.

    is_translated: of another API's request, in which the server sets both switches, for whichever a template has.
    """
    given = {name for name, value in (body.chat_template_kwargs or {}).items() if value is not None}
    if is_translated:
        given -= set(THINKING_SWITCHES)
    if not given or tokenizer.chat_template is None:
        return []
    return [f"chat_template_kwargs.{name}" for name in sorted(given - tokenizer.template_variables)]


def ignored_in_thinking(body: ChatBody, tokenizer: Tokenizer) -> list[str]:
    """Return the fields about reasoning that have no effect on this model."""
    chat_format = tokenizer.chat_format
    effort, budget = body.reasoning_effort, body.thinking_token_budget
    if effort is None and budget is None:
        return []
    can_limit = chat_format.takes_budget or _tokens(tokenizer) is not None
    is_effort_read = chat_format.takes_effort or chat_format.thinking_switch is not None
    is_effort_a_limit = can_limit and budget is None and effort in EFFORT_TOKENS
    ignored = ["reasoning_effort"] if effort is not None and not (is_effort_read or is_effort_a_limit) else []
    return ignored + (["thinking_token_budget"] if budget is not None and not can_limit else [])


def thinking_budget(
    body: ChatBody, tokenizer: Tokenizer, place: ReasoningPlace, *, has_calls: bool
) -> ThinkingBudget | None:
    """Return the limit for the engine; None if there is none, or nothing that it could end.

    `place`: where in its reasoning the answer begins. `has_calls`: the answer may be a call.
    """
    limit = _limit(body, tokenizer.chat_format)
    tokens = _tokens(tokenizer) if limit is not None and place != "none" else None
    if limit is None or tokens is None:
        return None
    start_ids, end_id = tokens
    forced_ids = [*tokenizer.encode_inner("\n"), end_id]
    budget = ThinkingBudget(limit, start_ids, end_id, forced_ids, is_open=place == "open")
    if not tokenizer.chat_format.is_harmony:
        # A name after the opening token is forced: a model may cut it into other tokens than the tokenizer does
        return msgspec.structs.replace(budget, start_ids=start_ids[:1], opening_ids=start_ids[1:])
    # What follows is a message in another channel: the answer, or what the model chooses if it may call a tool
    channel = f"{harmony.END}{harmony.START}assistant{harmony.CHANNEL}"
    forced = channel if has_calls else f"{channel}final{harmony.MESSAGE}"
    return msgspec.structs.replace(
        budget,
        forced_ids=tokenizer.encode(forced, add_special_tokens=False),
        is_repeated=True,
        not_after_ids=tokenizer.encode_inner("analysis")[:1] if has_calls else [],
    )


def _limit(body: ChatBody, chat_format: ChatFormat) -> int | None:
    """Return the most tokens of reasoning, or None."""
    if body.thinking_token_budget is not None:
        return body.thinking_token_budget
    effort = body.reasoning_effort
    if effort is None or chat_format.takes_effort or (effort == "none" and chat_format.thinking_switch is not None):
        return None
    return EFFORT_TOKENS.get(effort)


def _tokens(tokenizer: Tokenizer) -> tuple[list[int], int] | None:
    """Return the tokens that open reasoning and the one that closes it; None if there are none, or tags of text."""
    chat_format = tokenizer.chat_format
    tags = chat_format.reasoning
    if tags is None:
        return None
    ids = tokenizer.tag_ids(chat_format.tags(has_tools=False))
    start = tokenizer.encode(tags.opening, add_special_tokens=False)
    if tags.closing not in ids or not start or start[0] not in ids.values():
        return None
    return start, ids[tags.closing]
