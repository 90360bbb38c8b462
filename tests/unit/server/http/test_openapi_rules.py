"""The document takes a body exactly where the server does: the rules between a body's fields, each kept and broken."""

import pytest

from tests.support.chat_models import TOOLS, ChatModels
from tests.support.json_schema import fits

CHAT, COMPLETION = "/v1/chat/completions/render", "/v1/completions/render"
RESPONSES, COUNT, TOKENIZE = "/v1/responses", "/v1/messages/count_tokens", "/tokenize"
HI = [{"role": "user", "content": "hi"}]
LEAST = {
    CHAT: {"messages": HI},
    COMPLETION: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    COUNT: {"model": "tiny", "messages": HI},
    TOKENIZE: {"messages": HI},
}
FUNCTION = {"type": "function", "name": "f"}
CLIENT_TOOL = {"name": "f", "input_schema": {}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
THINKS = {"type": "thinking", "thinking": "x"}
SCHEMA = {"name": "a", "schema": {"type": "object"}}
LONG = "x" * 513


def _choice(*, mode: str) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": TOOLS}}


RULES = [
    *[
        row
        for path in (CHAT, COMPLETION)
        for row in [
            (path, {"stream_options": {}}, {"stream": True, "stream_options": {}}),
            (path, {"stream_options": {}, "stream": False}, {"stream_options": None}),
            (path, {"prompt_logprobs": 0, "stream": True}, {"prompt_logprobs": 0, "stream": False}),
            (path, {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "json_object"}}),
            (
                path,
                {"response_format": {"type": "text", "json_schema": SCHEMA}},
                {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            ),
            (
                path,
                {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
                {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            ),
            (path, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, {"structured_outputs": {"choice": ["a"]}}),
            (path, {"structured_outputs": {"regex": "a\\"}}, {"structured_outputs": {"regex": "a\\\\"}}),
            (path, {"structured_outputs": {"grammar": "a ::= b"}}, {"structured_outputs": {"grammar": 'start: "a"'}}),
            (path, {"structured_outputs": {"grammar": " {}"}}, {"structured_outputs": {}}),
        ]
    ],
    (CHAT, {"top_logprobs": 1}, {"top_logprobs": 1, "logprobs": True}),
    (CHAT, {"top_logprobs": 1, "logprobs": False}, {"top_logprobs": 0}),
    (CHAT, {"tool_choice": "required"}, {"tool_choice": "required", "tools": TOOLS}),
    (
        CHAT,
        {"tool_choice": _choice(mode="none"), "tools": TOOLS},
        {"tool_choice": _choice(mode="auto"), "tools": TOOLS},
    ),
    (CHAT, {"tool_choice": _choice(mode="auto")}, {"tool_choice": _choice(mode="required"), "tools": TOOLS}),
    (CHAT, {"functions": [{}]}, {"functions": None}),
    (CHAT, {"functions": []}, {}),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, {"chat_template_kwargs": {"a": 1}}),
    (COMPLETION, {"max_tokens": 0}, {"max_tokens": 0, "echo": True}),
    (COMPLETION, {"max_tokens": 0, "echo": False}, {"max_tokens": 0, "prompt_logprobs": 0}),
    (TOKENIZE, {"tool_choice": "required"}, {"tool_choice": "auto"}),
    (TOKENIZE, {"continue_final_message": True, "add_generation_prompt": True}, {"continue_final_message": True}),
    (TOKENIZE, {"chat_template_kwargs": {"messages": []}}, {"chat_template_kwargs": {"a": 1}}),
    (RESPONSES, {"tools": [{"type": LONG}]}, {"tools": [{"type": "web_search"}]}),
    (RESPONSES, {"tools": [{"type": 5}]}, {"tools": []}),
    (RESPONSES, {"tool_choice": "required"}, {"tool_choice": "required", "tools": [FUNCTION]}),
    (RESPONSES, {"tool_choice": "required", "tools": [{"type": "x"}]}, {"tool_choice": "auto"}),
    (RESPONSES, {"input": [{"type": "x"}]}, {"input": [{"type": "x"}], "instructions": "hi"}),
    (RESPONSES, {"input": [{"type": "x"}], "instructions": ""}, {"input": [{"type": "x"}, *HI]}),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, {"text": {"format": {"type": "json_schema", **SCHEMA}}}),
    (
        RESPONSES,
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]},
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "text"}}]},
    ),
    (RESPONSES, {"chat_template_kwargs": {"tools": []}}, {"chat_template_kwargs": {"a": 1}}),
    (COUNT, {"tools": [{"type": LONG}]}, {"tools": [{"type": "web_search_20250305"}]}),
    (COUNT, {"tools": [{"type": 5}]}, {"tools": [CLIENT_TOOL]}),
    (COUNT, {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "any"}, "tools": [CLIENT_TOOL]}),
    (
        COUNT,
        {"tool_choice": {"type": "tool"}, "tools": [CLIENT_TOOL]},
        {"tool_choice": {"type": "tool", "name": "f"}, "tools": [CLIENT_TOOL]},
    ),
    (COUNT, {"system": [{"type": "text"}]}, {"system": []}),
    *[
        (
            COUNT,
            {"messages": [{"role": wrong, "content": [block]}, *HI]},
            {"messages": [{"role": right, "content": [block]}, *HI]},
        )
        for block, wrong, right in [
            (USE, "user", "assistant"),
            (THINKS, "system", "assistant"),
            (RESULT, "assistant", "user"),
        ]
    ],
    (COUNT, {"messages": [{"role": "user", "content": []}]}, {"messages": [*HI, {"role": "assistant", "content": []}]}),
    (
        COUNT,
        {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "x"}]}], "system": "hi"},
    ),
]


@pytest.fixture(scope="module")
def app(harness, tmp_path_factory):
    """One for all cases, which leave nothing behind."""
    return ChatModels(harness, tmp_path_factory.mktemp("model"))("hi")


@pytest.fixture(scope="module")
def document(app):
    return app.app.openapi()


# rule: Endpoints: The OpenAPI document is as strict as the server
@pytest.mark.parametrize(("path", "broken", "kept"), RULES)
def test_document_and_server_refuse_the_same(app, document, path, broken, kept):
    content = document["paths"][path]["post"]["requestBody"]["content"]
    for fields, is_right in ((broken, False), (kept, True)):
        body = LEAST[path] | fields
        reply = app.post(path, body)
        assert (reply.status_code, is_right) in ((200, True), (400, False)), reply.text
        assert fits(body, content["application/json"]["schema"], document) is is_right, body
