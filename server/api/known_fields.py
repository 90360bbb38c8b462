"""Known fields: what clients of other servers and of other APIs send, and the field of the same meaning here. Pure.

A field that no API here has is reported (server/api/ignored_fields.py), with these exceptions: without one that
constrains the answer, or that has a part of the prompt, the answer would be another one than the client takes it for.
They are refused with the field to send instead. Null, empty values and the format of plain text ask for nothing.
"""

import re
from collections.abc import Mapping
from typing import Any

from engine.interface.errors import UnsupportedFeature

_SYSTEM_MESSAGE = "a message of the role system"
_LARK = "structured_outputs.grammar, in Lark's syntax"
_CONSTRAINTS = {
    # vLLM before its structured_outputs, SGLang
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": _LARK,
    "regex": "structured_outputs.regex",
    "ebnf": _LARK,
    # llama.cpp, ollama
    "grammar": _LARK,
    "json_schema": "response_format, of the type json_schema",
    "format": "response_format",
}
_ANOTHER_ANSWER = {
    "lora_path": "model, with the name of an adapter",  # SGLang
    "use_beam_search": "temperature 0: beams are not searched",  # vLLM
    "image_data": "text: pictures are not read",  # SGLang, llama.cpp
}
CHAT_FIELDS = (
    _CONSTRAINTS
    | _ANOTHER_ANSWER
    | {
        "prompt": "messages, or POST /v1/completions",
        "input": "messages, or POST /v1/responses",
        "system": _SYSTEM_MESSAGE,
        "instructions": _SYSTEM_MESSAGE,
        "documents": "a message with their text",
        "chat_template": "--chat-template FILE of quire serve",
    }
)
MESSAGE_FIELDS = {"images": "text: pictures are not read"}  # of one message of a chat; ollama's
COMPLETION_FIELDS = (
    _CONSTRAINTS
    | _ANOTHER_ANSWER
    | {
        "context": "prompt, with all tokens or all text before",  # ollama
        "messages": "prompt, or POST /v1/chat/completions",
        "input": "prompt",
        "system": "prompt, which has all text that the model reads",
    }
)
_ELSEWHERE = "structured_outputs of POST /v1/chat/completions"  # these APIs have schemas alone


def _constraints(schema: str) -> dict[str, str]:
    """Return what stands for the constraints in an API whose field `schema` takes a JSON schema, and nothing else."""
    of_schema = {"guided_json", "json_schema", "format"}
    named = {name: schema if name in of_schema else _ELSEWHERE for name in _CONSTRAINTS}
    return named | {"response_format": schema, "structured_outputs": f"{schema}, or {_ELSEWHERE}"}


RESPONSES_FIELDS = _constraints("text.format") | {"messages": "input", "system": "instructions"}
MESSAGES_FIELDS = _constraints("output_config.format") | {"instructions": "system", "prompt": "messages"}

_TOOL = 'a tool is {"type": "function", "function": {"name": …, "parameters": …}} in this API'
_OF_EMBEDDINGS = "input is a field of /v1/responses and /v1/embeddings"
_OF_CHAT = "messages is a field of /v1/chat/completions"
# path of a field that is missing, without places in lists → fields that were given beside it, and what they tell
_MISSING = {
    "messages": {"prompt": "prompt is a field of /v1/completions", "input": _OF_EMBEDDINGS},
    "prompt": {"messages": _OF_CHAT, "input": _OF_EMBEDDINGS},
    "input": {"messages": _OF_CHAT, "prompt": "prompt is a field of /v1/completions"},
    "max_tokens": {"max_completion_tokens": "max_completion_tokens is OpenAI's name of it"},
    "tools.function": {"name": _TOOL},
    "tools.type": {"function": 'it is "function"', "name": _TOOL},
    "tools.name": {"function": "name, description and parameters are beside type in this API"},
    "tools.input_schema": {"parameters": "parameters is OpenAI's name of it"},
    "response_format.json_schema.name": {
        "schema": "any name of 1 to 64 letters, digits, _ and - will do",
        "type": 'a schema is a field of json_schema: {"name": …, "schema": {…}}',
    },
    "response_format.json_schema.schema": {"type": 'a schema is a field of json_schema: {"name": …, "schema": {…}}'},
}
_PLACES = re.compile(r"\[\d+\]")
_PLAIN_TEXT = {"type": "text"}  # the default of response_format and of text.format


def refuse_known(given: Mapping[str, Any], known: Mapping[str, str], *, at: str = "") -> None:
    """Refuse the first field of another server that has a value. `at`: the path of the object that has the fields."""
    for name, value in given.items():
        if value and value != _PLAIN_TEXT and name in known:
            field = f"{at}.{name}" if at else name
            raise UnsupportedFeature(f"{field} is not served: use {known[name]}.", param=field)


def about_missing(path: str, given: Any) -> str:
    """Return what the other fields of an object tell of a field that it lacks, as the end of a sentence."""
    if not isinstance(given, dict):
        return ""
    told = (sentence for other, sentence in _MISSING.get(_PLACES.sub("", path), {}).items() if other in given)
    return next((f"; {sentence}" for sentence in told), "")
