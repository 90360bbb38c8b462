"""How long a client asks for its prompt to stay in the prefix cache, from the fields of each API. Pure.

OpenAI's prompt_cache_retention and prompt_cache_key ask for a whole prompt. Anthropic's cache_control marks the end of
a prefix; the whole prompt is kept, for the longest time that one of its marks names.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

# OpenAI's values, whose "in_memory" is 5 to 10 minutes without use, and Anthropic's
Retention = Literal["in_memory", "in-memory", "24h", "5m", "1h"]
_SECONDS: dict[Retention, float] = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86_400.0, "5m": 300.0, "1h": 3600.0}


def pin_s_of(key: str | None, retention: Retention | None) -> float:
    """Return the seconds since its last token for which a prompt stays; 0: no longer than others."""
    return _SECONDS[retention or "in_memory"] if key or retention else 0.0


def longest_mark(control: Any, contents: Iterable[Any]) -> Retention | None:
    """Return the longest time of the request's own cache_control and of the marks in its parts; None: none is there.

    contents: lists of parts, blocks or tools as the client sent them, or strings.
    """
    times = {_time_of(mark) for mark in [control, *_marks(contents)]}
    return "1h" if "1h" in times else "5m" if "5m" in times else None


def _marks(contents: Iterable[Any]) -> Iterator[Any]:
    for content in contents:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield part.get("cache_control")
                yield from _marks([part.get("content")])  # of a tool's result


def _time_of(mark: Any) -> Retention | None:
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        return None
    return "1h" if mark.get("ttl") == "1h" else "5m"
