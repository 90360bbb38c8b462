"""Loaded by schemathesis: refusals of requests that the OpenAPI document allows, because JSON Schema cannot say more.

Each is the beginning of the error's message. A request that fits the document and is refused with any other message
fails the test, as does every other check.
"""

import re
from typing import Any

import schemathesis

BETWEEN_FIELDS = (
    r"top_logprobs needs logprobs",
    r"stream_options needs stream",
    r"prompt_logprobs are not part of streams",
    r"best_of: best_of other than n",
    r"continue_final_message and add_generation_prompt exclude",
    r"min_tokens is \d+, more than",
    r"max_tokens = 0 needs echo",
    r"tool_choice(\.type)? is .*, but there are no tools",
    r"tool_choice names the function .*, which is not among",
    r"tools\[\d+\]\S* is '.*', which another tool is called already",
    r"\d+ prompts × n = \d+ are",
    r"tool_choice\.name is required",
    r"response_format\.json_schema (is required|needs the type)",
    r"text\.format\.(name|schema) is required",
    r"tools\[\d+\]\.format\.(syntax|definition) is required",
    r"structured_outputs has .*; only one",
    r"response_format and .* both constrain",
    r"(input|messages) has no (message|text)",
    r"messages ends with a tool_use block",
    r"messages\[\d+\]\.content\[\d+\] is a \w+ block, which a",
    r"messages\[\d+\]\.content is an empty list",
    r"\d+ choices are more than this server holds",
)
OF_THE_MODEL = (  # of its context and its speed, its tokenizer and its template
    r"This model's maximum context length is",
    r"The request took longer than its limit",
    r"\S+ has no tokens",
    r"prompt_name '",
    r"dimensions is",
)
LANGUAGES = (  # of schemas, regular expressions and grammars
    r"\S+ is a string that is not JSON",
    r"(structured_outputs|response_format|text\.format|output_config\.format|tools)\S* does not compile",
)


def pattern_of(*rules: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{rule})" for rule in rules))


EXEMPT = pattern_of(*BETWEEN_FIELDS, *OF_THE_MODEL, *LANGUAGES)


def has_integral_float(value: Any) -> bool:
    """Return whether a body has a number as 1.0, which is an integer in JSON Schema and none to this server."""
    if isinstance(value, dict | list):
        return any(map(has_integral_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


@schemathesis.hook
def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
    """Return whether a failure counts."""
    if type(failure).__name__ != "RejectedPositiveData":
        return True
    message = response.json()["error"]["message"]
    if EXEMPT.match(message):
        return False
    return not (re.search(r"valid integer|token ids", message) and has_integral_float(case.body))
