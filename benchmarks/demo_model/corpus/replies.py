"""A reply as text, tags and all, and as a client gets it. The form is that of the Qwen3 and Hermes families."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.demo_model.corpus.base import Reply

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def read_reply(raw: str) -> Reply:
    """Take a generated text apart. A text that ends a thought need not begin one: the prompt may have done so.

    A thought that never ends, and a call that is not JSON, stay in the content.
    """
    reasoning, content = None, raw
    if "</think>" in raw:
        reasoning, content = raw.split("</think>", 1)
        reasoning = reasoning.strip().removeprefix("<think>").strip() or None
    calls = [_call(text) for text in _CALL.findall(content)]
    if calls and all(call is not None for call in calls):
        content = _CALL.sub("", content)
        return Reply(content.strip(), reasoning, [call for call in calls if call is not None], raw)
    return Reply(content.strip(), reasoning, (), raw)


def with_reasoning(reasoning: str, content: str) -> str:
    """Return the text of a reply that thinks first."""
    return f"<think>\n{reasoning}\n</think>\n\n{content}"


def with_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a reply that calls tools; a call is {"name": str, "arguments": dict}."""
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)


def _call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
    return call if is_call else None
