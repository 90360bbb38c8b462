"""Rewrites messages for templates in harmony's format, which drop what does not fit them. Pure; changes no message.

Such a template shows one instruction, the first message, one call of a message, without what was said before it, and
names no call in a result: it takes the last one's. So the instructions become one message, each call comes right before
its result, and text beside a call joins the reasoning, as the template says.
"""

from typing import Any

Message = dict[str, Any]

_INSTRUCTIONS = ("system", "developer")
# The efforts that the format has no word for
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def harmony_effort(effort: str) -> str:
    """Return the word for an effort: low, medium or high."""
    return _EFFORTS.get(effort, effort)


def harmony_messages(messages: list[Message]) -> list[Message]:
    """Return the messages as the template takes them."""
    instructions = [message for message in messages if message["role"] in _INSTRUCTIONS]
    rest = [message for message in messages if message["role"] not in _INSTRUCTIONS]
    first: list[Message] = []
    if instructions:
        first = [{"role": "developer", "content": "\n\n".join(message["content"] for message in instructions)}]
    found: list[Message] = []
    while rest:
        message = rest.pop(0)
        if not message.get("tool_calls"):
            found.append(message)
            continue
        num_results = next((i for i, other in enumerate(rest) if other["role"] != "tool"), len(rest))
        found += _one_call_each(message, rest[:num_results])
        del rest[:num_results]
    return first + found


def _one_call_each(message: Message, results: list[Message]) -> list[Message]:
    """Return a message for each call, with its result after it; results without a call come last."""
    thoughts = [message.get("reasoning_content"), message.get("content")]
    shared = {key: value for key, value in message.items() if key not in ("reasoning_content", "content", "tool_calls")}
    found: list[Message] = []
    left = list(results)
    for i, call in enumerate(message["tool_calls"]):
        own: Message = {**shared, "tool_calls": [call]}
        if i == 0 and any(thoughts):
            own["reasoning_content"] = "\n".join(filter(None, thoughts))
        found.append(own)
        answers = [result for result in left if result.get("tool_call_id") == call.get("id")]
        found += answers
        left = [result for result in left if result not in answers]
    return found + left
