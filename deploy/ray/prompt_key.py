"""prompt_key(): a request's session, equal for requests that can share a prefix of the KV cache. Imports msgspec.

Turns of a chat begin alike, so the key is made of what they keep: system prompt and messages up to the first of the
user, of all that the first kilobytes. Two chats with the same short system prompt differ by then, and are spread; two
questions about one long document do not, and meet where it is cached.
"""

from hashlib import blake2b

import msgspec

KEY_BYTES = 4096  # of the prompt: about a thousand tokens, the least that is worth a detour

_NOTHING = msgspec.Raw(b"")


class _Item(msgspec.Struct):
    role: str = ""


class _Body(msgspec.Struct):
    """The fields of all APIs' request bodies that contain the prompt."""

    model: msgspec.Raw = _NOTHING
    prompt_cache_key: str | None = None
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING


_bodies = msgspec.json.Decoder(_Body)
_lists = msgspec.json.Decoder(list[msgspec.Raw])
_items = msgspec.json.Decoder(_Item)


def prompt_key(body: bytes) -> str:
    """Return a request's session from its body; "" if it has no prompt or is not valid JSON of a known API."""
    try:
        found = _bodies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    parts = [found.system, found.instructions, _opening(found.messages), _opening(found.input), found.prompt]
    text = b"\n".join(bytes(part) for part in parts if part)
    if not text:
        return ""
    if found.prompt_cache_key:
        text = found.prompt_cache_key.encode("utf-8", "surrogatepass")
    return "prompt-" + blake2b(bytes(found.model) + b"\n" + text[:KEY_BYTES], digest_size=12).hexdigest()


def _opening(messages: msgspec.Raw) -> bytes:
    """Return a conversation up to its first user message; anything but a list of messages is returned whole."""
    opening: list[bytes] = []
    try:
        for message in _lists.decode(messages):
            opening.append(bytes(message))
            if _items.decode(message).role == "user":
                break
    except (msgspec.DecodeError, UnicodeDecodeError):
        return bytes(messages)
    return b"\n".join(opening)
