"""Loaded by schemathesis: refusals of requests that the OpenAPI document allows, because JSON Schema cannot say more.

Each is the beginning of the error's message. A request that fits the document and is refused with any other message
fails the test, as does every other check.
"""

import re
from typing import Any

import schemathesis

MODEL = "quire-demo"  # as test_schema.py serves it
MAX_NAME_CHARS = 512

COMPARED = (  # values of one request with each other, which JSON Schema never does
    r"best_of: best_of other than n",
    r"min_tokens is \d+, more than",
    r"\d+ prompts × n = \d+ are",
    r"tool_choice names the function .*, which is not among",
    r"tool_choice is 'required', but there are no tools",  # none of those whose names allowed_tools lists
    r"tools\[\d+\]\S* is '.*', which another tool is called already",
    r"messages\[\d+\]\.tool_call_id is .*, which no tool call",
)
BEYOND_DRAWING = (r"continue_final_message and add_generation_prompt exclude",)  # a fifth rule between fields of a chat
OF_OTHERS = (r"\S+ is not served: use ",)  # names of other servers, in a document that takes fields of any name
IN_ORDER = (  # JSON Schema knows first items, and no last ones
    r"messages ends with a tool_use block",
    r"continue_final_message needs a last message",
    r"messages\[\d+\]\.content is an empty list",  # an assistant's, which only the last message may have
)
OF_THE_MODEL = (  # of its context and its speed, its tokenizer and its template
    r"(prompt is too long: )?This model's maximum context length is",
    r"The request took longer than its limit",
    r"\S+ has no tokens",
    r"prompt_name '",
    r"continue_final_message: the chat template leaves out",
    r"dimensions is",
    r"engine: '",  # an engine that this server has not, whose name is any text in the document
)
LANGUAGES = (  # of JSON within strings, schemas, regular expressions and grammars, and sealed reasoning
    r"\S+ is a string that is not JSON",
    r"(structured_outputs|response_format|text\.format|output_config\.format|tools)\S* does not compile",
    r"(response_format|text\.format|output_config\.format|tools)(?s:.*) has the keyword .*, unknown",  # strict: true
    r"(input|messages) has no (message|text)",  # nothing but reasoning whose text is empty, or sealed by another server
)


def pattern_of(*rules: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{rule})" for rule in rules))


EXEMPT = pattern_of(*COMPARED, *BEYOND_DRAWING, *OF_OTHERS, *IN_ORDER, *OF_THE_MODEL, *LANGUAGES)


def has_integral_float(value: Any) -> bool:
    """Return whether a body has a number as 1.0, which is an integer in JSON Schema and none to this server."""
    if isinstance(value, dict | list):
        return any(map(has_integral_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Ask for the model that is served: most drawn names would end in a 404 before any other check."""
    name = case.body.get("model") if isinstance(case.body, dict) else None
    if isinstance(name, str) and len(name) <= MAX_NAME_CHARS:
        case.body["model"] = MODEL


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Return whether a failure counts."""
    if type(failure).__name__ != "RejectedPositiveData":
        return True
    message = response.json()["error"]["message"]
    if EXEMPT.match(message):
        return False
    return not (re.search(r"valid integer|token ids", message) and has_integral_float(case.body))
