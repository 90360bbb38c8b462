"""The costliest body that each route accepts or refuses only after its work, for the tests of costs."""

import json

import msgspec

from engine.interface.config import ServerConfig
from server.api.limits import LIMITS
from server.api.messages.schema import MAX_BLOCKS
from server.api.schemas import MAX_DETOKENIZE, MAX_MESSAGES

_NUM_PARTS = 7  # of a message: all of them together have nearly the most strings
_FILL = "u" * (3 * 2**20)  # of a field without effect

_IDS = [5] * (LIMITS.prompt_tokens // 1024 - 1) + [2**31 - 1]  # the last is in no vocabulary
_PARTS = [{"type": "text", "text": "a"}] * _NUM_PARTS
_MESSAGES = [{"role": "user", "content": _PARTS}] * (MAX_MESSAGES - 1)
_CHAT = {"messages": _MESSAGES, "unknown": _FILL}
_BLOCKS = [{"type": "text", "text": "a", "cache_control": {"type": "e"}}] * (MAX_BLOCKS - 1)
_COUNT = {"model": "quire-demo", "messages": [{"role": "user", "content": _BLOCKS}], "unknown": _FILL}
_COMPLETION = {"prompt": [[5] * 1024] * 1023 + [_IDS], "max_tokens": 1}
_TOKENIZE = {"prompt": "quire " * (LIMITS.counted_tokens // 3), "with_pieces": True, "return_token_strs": True}
_INPUT = [{"type": "input_text", "text": "a"}] * _NUM_PARTS

COSTLY_BODIES = {
    path: json.dumps(body).encode()
    for path, body in {
        "/v1/chat/completions": _CHAT,
        "/v1/completions": _COMPLETION,
        "/v1/responses": {"input": [{"role": "user", "content": _INPUT}] * (MAX_MESSAGES - 1), "unknown": _FILL},
        "/v1/messages": {**_COUNT, "max_tokens": 1},
        "/v1/messages/count_tokens": _COUNT,
        "/v1/embeddings": {"input": [[5] * 1024] * 1023 + [_IDS]},
        "/tokenize": _TOKENIZE,
        "/detokenize": {"tokens": [5] * MAX_DETOKENIZE},
        "/v1/chat/completions/render": _CHAT,
        "/v1/completions/render": _COMPLETION,
    }.items()
}


def max_body_bytes() -> int:
    """Return the limit of one body."""
    return {field.name: field.default for field in msgspec.structs.fields(ServerConfig)}["max_body_bytes"]
