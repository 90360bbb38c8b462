"""How long a client asks for its prompt to stay in the prefix cache, from the fields of each API. Pure.

OpenAI's prompt_cache_retention, prompt_cache_options and prompt_cache_key ask for a whole prompt. Anthropic's
cache_control and OpenAI's prompt_cache_breakpoint mark the end of a prefix; the whole prompt is kept, for the longest
time that one of its marks names.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from engine.interface.errors import InvalidParameter, UnsupportedFeature
from server.api.strict_json import StrictModel

# OpenAI's values, whose "in_memory" is 5 to 10 minutes without use, and Anthropic's
Retention = Literal["in_memory", "in-memory", "24h", "12h", "5m", "30m", "1h"]
_SECONDS: dict[Retention, float] = {"5m": 300.0, "in_memory": 600.0, "in-memory": 600.0, "30m": 1800.0, "1h": 3600.0}
_SECONDS |= {"12h": 43_200.0, "24h": 86_400.0}
_TTLS: dict[str, Retention] = {"30m": "30m", "12h": "12h"}  # of a breakpoint
_DEFAULT_TTL: Retention = "30m"  # of prompt_cache_options, and of a breakpoint without them
_BREAKPOINT = "prompt_cache_breakpoint"
_CONTENT_KEYS = ("content", "output")  # of a tool's result: Anthropic's, OpenAI's


class PromptCacheOptions(StrictModel):
    """prompt_cache_options"""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None  # known, refused if true


def pin_s_of(key: str | None, retention: Retention | None) -> float:
    """Return the seconds since its last token for which a prompt stays; 0: no longer than others."""
    return _SECONDS[retention or "in_memory"] if key or retention else 0.0


def longest_of(*retentions: Retention | None) -> Retention | None:
    """Return the longest of some times; None: there is none."""
    return max((time for time in retentions if time is not None), key=_SECONDS.__getitem__, default=None)


def longest_mark(control: Any, contents: Iterable[Any]) -> Retention | None:
    """Return the longest time of the request's own cache_control and of the marks in its parts; None: none is there.

    contents: lists of parts, blocks or tools as the client sent them, or strings.
    """
    marks = [control, *_marks(contents, "cache_control")]
    return longest_of(*(_time_of(mark) for mark in marks))


def longest_breakpoint(options: PromptCacheOptions | None, contents: Iterable[Any]) -> Retention | None:
    """Return the longest time of prompt_cache_options and of the breakpoints in the parts; None: none is there.

    contents: as longest_mark()'s. The implicit breakpoint of the options is the end of the prompt.
    Raises UnsupportedFeature for a prompt that is only to be cached, and InvalidParameter for an unknown breakpoint.
    """
    if options is not None and options.prewarm:
        field = "prompt_cache_options.prewarm"
        raise UnsupportedFeature(f"{field}: a prompt is cached with its answer; ask for one token.", param=field)
    default = (options.ttl if options is not None else None) or _DEFAULT_TTL
    is_implicit = options is not None and options.mode != "explicit"
    marks = [mark for mark in _marks(contents, _BREAKPOINT) if mark is not None]
    return longest_of(default if is_implicit else None, *(_ttl_of(mark) or default for mark in marks))


def _ttl_of(mark: Any) -> Retention | None:
    """Return the time that a breakpoint names. Raises InvalidParameter."""
    if not isinstance(mark, dict):
        raise _unknown(_BREAKPOINT, "an object", mark)
    if mark.get("mode") not in (None, "explicit"):
        raise _unknown(f"{_BREAKPOINT}.mode", "explicit", mark["mode"])
    ttl = mark.get("ttl")
    if ttl is not None and (not isinstance(ttl, str) or ttl not in _TTLS):
        raise _unknown(f"{_BREAKPOINT}.ttl", " or ".join(_TTLS), ttl)
    return _TTLS[ttl] if ttl is not None else None


def _unknown(field: str, known: str, value: Any) -> InvalidParameter:
    shown = f", got {value[:40]!r}" if isinstance(value, str) else ""  # others may be large
    return InvalidParameter(f"{field} must be {known}{shown}.", param=field)


def _marks(contents: Iterable[Any], name: str) -> Iterator[Any]:
    for content in contents:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield part.get(name)
                yield from _marks([part.get(key) for key in _CONTENT_KEYS], name)


def _time_of(mark: Any) -> Retention | None:
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        return None
    return "1h" if mark.get("ttl") == "1h" else "5m"
