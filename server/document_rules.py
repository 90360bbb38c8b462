"""Rules between the fields of request bodies, in JSON Schema, for the OpenAPI document. Pure; imports nothing.

The server's checks of them are in the code that uses the fields, with messages that name field and value. In all rules
null means absent. Rules that compare two values, such as min_tokens with max_tokens, cannot be written in JSON Schema:
tests/openapi/hooks.py lists them.
"""

from typing import Any

Schema = dict[str, Any]

ABSENT: Schema = {"type": "null"}
GIVEN: Schema = {"not": {"type": "null"}}
FALSE: Schema = {"enum": [None, False]}


def either(*schemas: Schema) -> Schema:
    """Return the schema of what at least one of some schemas takes."""
    return {"anyOf": list(schemas)}


def where(**fields: Schema) -> Schema:
    """Return the schema of objects whose fields of these names, if there, are like this."""
    return {"properties": fields}


def having(**fields: Schema) -> Schema:
    """Return the schema of objects that have fields of these names, like this."""
    return {"properties": fields, "required": list(fields)}


def rules(*schemas: Schema) -> Any:
    """Return an object's rules, as a model's json_schema_extra."""
    return {"allOf": list(schemas)}


_OUTPUTS = ("json", "regex", "choice", "grammar")  # fields of structured_outputs
ONE_OUTPUT = either(*(where(**{other: ABSENT for other in _OUTPUTS if other != name}) for name in _OUTPUTS))
_STREAM = {**where(prompt_logprobs=ABSENT, stream={"const": True}), "required": ["stream"]}
_STREAM_OR_WHOLE = either(_STREAM, where(stream_options=ABSENT, stream=FALSE))
_ONE_CONSTRAINT = either(
    where(structured_outputs=either(ABSENT, where(**dict.fromkeys(_OUTPUTS, ABSENT)))),
    where(response_format=either(ABSENT, where(type={"const": "text"}))),
)
_CHOICE_NEEDS_TOOLS = either(where(tool_choice={"enum": [None, "none", "auto"]}), having(tools={"type": "array"}))
_CONTINUES_OR_BEGINS = either(where(continue_final_message=FALSE), where(add_generation_prompt=FALSE))

GENERATION = (_STREAM_OR_WHOLE, _ONE_CONSTRAINT)  # of chat and completions
CHAT_PROMPT = (_CHOICE_NEEDS_TOOLS, _CONTINUES_OR_BEGINS)
# schemathesis draws chats for four rules and fails at five: _CONTINUES_OR_BEGINS is left out, and functions are
# documented as null, though they pass where function_call is none
CHAT = (
    *GENERATION,
    _CHOICE_NEEDS_TOOLS,
    either(where(top_logprobs={"enum": [None, 0]}), having(logprobs={"const": True})),
)
COMPLETION = (
    *GENERATION,
    either(where(max_tokens={"not": {"const": 0}}), having(echo={"const": True}), having(prompt_logprobs=GIVEN)),
)
RESPONSE_FORMAT = either(
    where(type={"enum": ["text", "json_object"]}, json_schema=ABSENT, schema=ABSENT),
    {**having(type={"const": "json_schema"}, json_schema=GIVEN, schema=ABSENT), "required": ["type", "json_schema"]},
)

# Messages
_CALLABLE = {"type": "array", "contains": where(type={"enum": [None, "custom"]})}
_BLOCK_WITH_TEXT = having(type={"enum": ["text", "thinking", "tool_use", "tool_result"]})
_SYSTEM_WITH_TEXT = either(
    {"type": "string", "minLength": 1}, {"type": "array", "contains": having(text={"type": "string", "minLength": 1})}
)
MESSAGES = (
    either(where(tool_choice=either(ABSENT, where(type={"enum": ["auto", "none"]}))), having(tools=_CALLABLE)),
    either(
        having(system=_SYSTEM_WITH_TEXT),
        where(messages={"contains": where(content=either({"type": "string"}, {"contains": _BLOCK_WITH_TEXT}))}),
    ),
)
NAMED_TOOL = either(where(type={"not": {"const": "tool"}}), having(name=GIVEN))

# Responses
_SERVED_ITEMS = ["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"]
_SERVED_ITEM = either(where(type=ABSENT), having(type={"enum": [*_SERVED_ITEMS, "reasoning"]}))
_MAY_CALL = {"type": "object", **having(type={"const": "allowed_tools"}, mode={"const": "auto"})}
_NEEDS_NO_TOOLS = either({"enum": [None, "auto", "none"]}, _MAY_CALL)
RESPONSES = (
    either(
        where(tool_choice=_NEEDS_NO_TOOLS),
        having(tools={"type": "array", "contains": having(type={"enum": ["function", "custom"]})}),
    ),
    either(
        having(instructions={"type": "string", "minLength": 1}),
        where(input=either({"type": "string"}, {"contains": _SERVED_ITEM})),
    ),
)
TEXT_FORMAT = either(where(type={"enum": ["text", "json_object"]}, schema=ABSENT), having(name=GIVEN, schema=GIVEN))
CUSTOM_FORMAT = either(where(type={"const": "text"}), having(syntax=GIVEN, definition=GIVEN))
