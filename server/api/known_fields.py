"""Known fields: what clients of other servers and of other APIs send, and the field of the same meaning here. Pure.

A field that no API here has is reported (server/api/ignored_fields.py), with these exceptions: without one that
constrains the answer or limits its length, or that has a part of the prompt or of the parameters, the answer would be
another one than the client takes it for. They are refused with the field to send instead; another server's name of the
limit is reported where the request has the limit by its name here, too, as those of clients for many servers, and where
a prompt is only counted. Null, empty values, objects of nulls and the format of plain text ask for nothing; false and
0 do where another server's default is not them.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from engine.interface.errors import UnsupportedFeature

_SYSTEM_MESSAGE = "a message of the role system"
_LARK = "structured_outputs.grammar, in Lark's syntax"
_NO_MODERATION = "a check of your own: nothing is moderated here"
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
_BESIDE = "its fields beside it"
_PARAMETERS = {
    "extra_body": _BESIDE,  # an argument of OpenAI's Python client, which sends what is in it; others send it as it is
    "options": _BESIDE,  # ollama
    "parameters": _BESIDE,  # TGI
    "sampling_params": _BESIDE,  # SGLang
}
# within such an object, and not refused outside: without them an answer is drawn otherwise, and is no other one
_RENAMED = {
    "repeat_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "num_ctx": "--max-model-len of quire serve",
}
_LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
_STOPS = {"stop", "stop_sequences"}
_OTHER_LENGTHS = ("max_new_tokens", "n_predict", "num_predict")  # TGI, llama.cpp, ollama
_LIMITS = dict.fromkeys((*_OTHER_LENGTHS, "max_output_tokens"), "max_tokens") | {"stop_sequences": "stop"}
CHAT_FIELDS = (
    _CONSTRAINTS
    | _ANOTHER_ANSWER
    | _PARAMETERS
    | _LIMITS
    | {
        "prompt": "messages, or POST /v1/completions",
        "input": "messages, or POST /v1/responses",
        "system": _SYSTEM_MESSAGE,
        "instructions": _SYSTEM_MESSAGE,
        "documents": "a message with their text",
        "chat_template": "--chat-template FILE of quire serve",
        "moderation": _NO_MODERATION,
    }
)
MESSAGE_FIELDS = {"images": "text: pictures are not read"}  # of one message of a chat; ollama's
COMPLETION_FIELDS = (
    _CONSTRAINTS
    | _ANOTHER_ANSWER
    | _PARAMETERS
    | _LIMITS
    | {
        "max_completion_tokens": "max_tokens",
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


RESPONSES_FIELDS = (
    _constraints("text.format")
    | _PARAMETERS
    | dict.fromkeys(("max_tokens", "max_completion_tokens", *_OTHER_LENGTHS), "max_output_tokens")
    | {
        "messages": "input",
        "moderation": _NO_MODERATION,
        "system": "instructions",
        "reasoning_effort": "reasoning.effort",
        "stop": "stop of POST /v1/chat/completions",
        "stop_sequences": "stop of POST /v1/chat/completions",
    }
)
MESSAGES_FIELDS = (
    _constraints("output_config.format")
    | _PARAMETERS
    | {
        "instructions": "system",
        "prompt": "messages",
        "output_format": "output_config.format",  # its name in Anthropic's beta
        "reasoning_effort": "output_config.effort",
        "stop": "stop_sequences",
    }
)

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
# of other servers: true by default, so that false asks for something
_OFF = frozenset({"add_special_tokens", "cache_prompt", "do_sample", "enable_thinking", "include_reasoning"})
_OFF |= {"normalize", "parallel_tool_calls", "parse_special", "separate_reasoning", "skip_special_tokens"}
_OFF |= {"spaces_between_special_tokens", "think", "truncate"}
# 0 by default, here or there, so that 0 asks for nothing
_ZERO = frozenset({"dry_multiplier", "dynatemp_range", "frequency_penalty", "min_p", "min_tokens", "mirostat"})
_ZERO |= {"n_keep", "n_probs", "presence_penalty", "priority", "top_a", "top_logprobs", "xtc_probability"}
_MAX_RENAMED = 8  # in one message
_PLACES = re.compile(r"\[\d+\]")
_PLAIN_TEXT = {"type": "text"}  # the default of response_format and of text.format


def refuse_known(body: BaseModel, known: Mapping[str, str], *, at: str = "") -> None:
    """Refuse the first field of another server that asks for something. `at`: the path of the object `body`."""
    for name, value in (body.model_extra or {}).items():
        if name not in known or not has_value(value) or value == _PLAIN_TEXT or _may_pass(body, known[name]):
            continue
        field = f"{at}.{name}" if at else name
        inner = _renamed(value, known) if name in _PARAMETERS and isinstance(value, dict) else ""
        raise UnsupportedFeature(f"{field} is not served: use {known[name]}{inner}.", param=field)


def asks(name: str, value: Any) -> bool:
    """Return whether an unknown field asks for something."""
    if value is False:
        return name in _OFF
    return has_value(value) and not (name in _ZERO and value == 0)


def has_value(value: Any) -> bool:
    """Return whether a value asks for something: null, empty values, false and objects of nulls do not."""
    if isinstance(value, dict):
        return any(inner is not None for inner in value.values())
    return bool(value) or type(value) in (int, float)


def _may_pass(body: BaseModel, field: str) -> bool:
    """Return whether a body may have a limit of the answer by another name than `field`.

    It has the limit by one of this server's names, too, or it is of a count, which has no answer.
    """
    names: Collection[str] = _LENGTHS if field in _LENGTHS else _STOPS & {field}
    values = [getattr(body, name) for name in names if name in type(body).model_fields]
    return any(value is not None for value in values) if values else bool(names)


def _renamed(values: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """Return which of an object's parameters have another name here, as the end of a sentence."""
    names = {**_RENAMED, **known}
    renamed = [f"{name} as {names[name]}" for name, value in values.items() if name in names and has_value(value)]
    return "".join(f", {text}" for text in renamed[:_MAX_RENAMED])


def about_missing(path: str, given: Any) -> str:
    """Return what the other fields of an object tell of a field that it lacks, as the end of a sentence."""
    if not isinstance(given, dict):
        return ""
    told = (sentence for other, sentence in _MISSING.get(_PLACES.sub("", path), {}).items() if other in given)
    return next((f"; {sentence}" for sentence in told), "")
