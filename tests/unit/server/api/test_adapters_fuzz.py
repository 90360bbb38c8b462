"""Whatever JSON comes to the adapters is translated, or refused as the client's fault: never a fault of ours."""

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface.errors import RequestError
from server.api.messages.request import translate_count, translate_messages
from server.api.messages.schema import CountTokensBody, MessagesBody
from server.api.responses.request import echo_of, translate_responses
from server.api.responses.schema import ResponsesBody
from server.api.strict_json import parse_body

TYPES = st.sampled_from(
    [
        *("message", "function_call", "function_call_output", "reasoning", "item_reference", "web_search_call"),
        *("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text", "input_image"),
        *("tool_use", "tool_result", "thinking", "redacted_thinking", "image", "function", "custom", "allowed_tools"),
        *("auto", "any", "tool", "none", "enabled", "disabled", "adaptive", "json_schema", "json_object"),
    ]
)
KEYS = st.sampled_from(
    [
        *("type", "role", "content", "text", "id", "name", "call_id", "arguments", "output", "summary", "refusal"),
        *("encrypted_content", "tool_use_id", "input", "signature", "thinking", "parameters", "input_schema", "schema"),
        *("format", "effort", "mode", "tools", "budget_tokens", "display", "strict", "description", "cache_control"),
    ]
)
FIELDS = [
    *("instructions", "system", "tools", "tool_choice", "text", "reasoning", "include", "thinking", "output_config"),
    *("metadata", "stop_sequences", "truncation", "store", "previous_response_id", "stream_options", "temperature"),
    *("max_output_tokens", "top_k", "top_logprobs", "chat_template_kwargs", "other"),
]
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=5) | TYPES | ROLES
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)
SPEAKERS = st.fixed_dictionaries({"role": ROLES, "content": JSON})
BODIES = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.just(9) | JSON, "input": JSON | st.lists(JSON | SPEAKERS, max_size=4)},
    optional=dict.fromkeys(FIELDS, JSON)
    | {"messages": st.lists(SPEAKERS, min_size=1, max_size=4)}
    | {"tools": st.lists(st.dictionaries(KEYS, JSON, max_size=5), max_size=3)},
)


def refuses_or_returns(work) -> None:
    with contextlib.suppress(RequestError):
        work()


@settings(deadline=None, max_examples=settings.default.max_examples)
@given(BODIES)
def test_a_response_request_is_translated_or_refused(value):
    def work():
        body = parse_body(ResponsesBody, value)
        translate_responses(body)
        echo_of(body)

    refuses_or_returns(work)


@settings(deadline=None, max_examples=settings.default.max_examples)
@given(BODIES)
def test_a_message_request_is_translated_or_refused(value):
    refuses_or_returns(lambda: translate_messages(parse_body(MessagesBody, value)))
    refuses_or_returns(lambda: translate_count(parse_body(CountTokensBody, value)))
