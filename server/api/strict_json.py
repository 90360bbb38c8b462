"""parse_json: a request body as a JSON object, with bounds on depth and text. Imports server.errors only."""

import re
from typing import Any

import msgspec

from server.errors import MalformedBody

MAX_JSON_DEPTH = 64
_SURROGATE = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
# All that comes before the first lone surrogate; possessive, since backtracking over 8 MiB would take its time.
_UP_TO_LONE_SURROGATE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+(?P<lone>" + _SURROGATE + rb")"
)
_UTF8_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse strictly: no NaN, no Infinity, no lone surrogates, no deep nesting. Raises MalformedBody."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        surrogate = _lone_surrogate(body)
        if surrogate is not None:
            raise MalformedBody(
                f"The body contains a lone surrogate, {surrogate}, which is not valid Unicode text."
            ) from None
        raise MalformedBody(f"The body is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(value, dict):
        raise MalformedBody("The body must be a JSON object.")
    if body.count(b"{") + body.count(b"[") > MAX_JSON_DEPTH and _is_deeper_than(value, MAX_JSON_DEPTH):
        raise _too_deep()
    return value


def _lone_surrogate(body: bytes) -> str | None:
    """Describe the first half of a UTF-16 pair without the other half, in a body that does not parse."""
    has_escape = b"\\ud" in body or b"\\uD" in body
    if has_escape and (match := _UP_TO_LONE_SURROGATE.match(body)):
        return f"{match['lone'].decode()} at byte {match.start('lone')}"
    if match := _UTF8_SURROGATE.search(body):
        return f"{match[0].hex(' ')} at byte {match.start()}"
    return None


def _too_deep() -> MalformedBody:
    return MalformedBody(f"The body is nested too deeply, the limit is {MAX_JSON_DEPTH} levels.")


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
