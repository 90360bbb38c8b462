"""Fields of other servers and of other APIs: one that would change the answer is refused, with the field to send."""

import re

import pytest

from engine.interface.errors import InvalidParameter, UnsupportedFeature
from server.api.generation_spec import check_chat, check_completion
from server.api.ignored_fields import ignored_fields
from server.api.known_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MESSAGE_FIELDS,
    MESSAGES_FIELDS,
    RESPONSES_FIELDS,
)
from server.api.messages.request import translate_messages
from server.api.messages.schema import MessagesBody
from server.api.responses.request import translate_responses
from server.api.responses.schema import ResponsesBody
from server.api.schemas import ChatBody, ChatMessage, CompletionBody
from server.api.strict_json import parse_body
from server.structured_output.grammar_spec import constraint_of
from tests.unit.server.conftest import check_error

HI = [{"role": "user", "content": "hi"}]
APIS = [
    (ChatBody, {"messages": HI}, check_chat, CHAT_FIELDS),
    (CompletionBody, {"prompt": "hi"}, check_completion, COMPLETION_FIELDS),
    (ResponsesBody, {"input": "hi"}, translate_responses, RESPONSES_FIELDS),
    (MessagesBody, {"model": "m", "max_tokens": 9, "messages": HI}, translate_messages, MESSAGES_FIELDS),
]


@pytest.mark.parametrize(("schema", "fields", "check", "known"), APIS)
def test_a_field_of_another_server_is_refused_with_the_field_to_send(schema, fields, check, known):
    for name in known:
        with pytest.raises(UnsupportedFeature) as info:
            check(parse_body(schema, {**fields, name: ["x"]}))
        assert info.value.param == name
        assert info.value.message == f"{name} is not served: use {known[name]}."
        check(parse_body(schema, {**fields, name: None}))


@pytest.mark.parametrize(("schema", "fields", "check", "known"), APIS)
def test_a_format_of_plain_text_is_every_apis_default(schema, fields, check, known):
    for name in {"format", "response_format"} & set(known):
        check(parse_body(schema, {**fields, name: {"type": "text"}}))
        with pytest.raises(UnsupportedFeature):
            check(parse_body(schema, {**fields, name: {"type": "json_object"}}))


@pytest.mark.parametrize(("schema", "known"), [(schema, known) for schema, _, _, known in APIS])
def test_no_field_of_a_table_is_one_of_that_api_and_those_to_send_are(schema, known):
    assert not set(known) & set(schema.model_fields)
    for sentence in known.values():
        first = re.match(r"[a-z_]+(?=[.,]|$)", sentence)
        assert first is None or first[0] in {*schema.model_fields, "prompt"}, sentence


def test_pictures_beside_a_message_are_refused_not_lost(harness):
    assert not set(MESSAGE_FIELDS) & set(ChatMessage.model_fields)
    reply = harness().chat(messages=[*HI, {"role": "user", "content": "what is it?", "images": ["aGk="]}])
    error = check_error(reply, 400, "unsupported_feature")
    assert error["param"] == "messages[1].images"
    assert error["message"] == "messages[1].images is not served: use text: pictures are not read."
    assert harness().chat(messages=[{**HI[0], "images": []}]).status_code == 200


@pytest.mark.parametrize(
    ("schema", "body", "said"),
    [
        (ChatBody, {"prompt": "hi"}, "messages is required; prompt is a field of /v1/completions."),
        (CompletionBody, {"messages": HI}, "prompt is required; messages is a field of /v1/chat/completions."),
        (ResponsesBody, {"model": "m"}, "input is required."),
        (ResponsesBody, {"messages": HI}, "input is required; messages is a field of /v1/chat/completions."),
        (
            ChatBody,
            {"messages": HI, "tools": [{"type": "function", "name": "f"}]},
            'tools[0].function is required; a tool is {"type": "function", "function": {"name": …, "parameters": …}}'
            " in this API.",
        ),
        (
            ChatBody,
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
            'response_format.json_schema.name is required; a schema is a field of json_schema: {"name": …, '
            '"schema": {…}}.',
        ),
    ],
)
def test_a_missing_field_is_explained_by_those_that_were_sent(schema, body, said):
    with pytest.raises(InvalidParameter) as info:
        parse_body(schema, body)
    assert info.value.message == said


def test_tools_in_the_form_of_another_api_are_explained():
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(InvalidParameter, match=r"tools\[0\]\.name is required; name, description and parameters"):
        translate_responses(parse_body(ResponsesBody, {"input": "hi", "tools": [tool]}))
    fields = {"model": "m", "max_tokens": 9, "messages": HI, "tools": [tool]}
    with pytest.raises(InvalidParameter, match=r'tools\[0\]\.type is "function", of OpenAI'):
        translate_messages(parse_body(MessagesBody, fields))


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "text"])
def test_a_schema_beside_the_type_is_refused_not_lost(kind):
    body = parse_body(ChatBody, {"messages": HI, "response_format": {"type": kind, "schema": {"type": "object"}}})
    assert ignored_fields(body) == []
    with pytest.raises(InvalidParameter, match="a schema is sent as") as info:
        constraint_of(body.response_format, None)
    assert info.value.param == "response_format.schema"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": "json"}, "response_format should be an object, got 'json'."),
        ({"messages": ["hi"]}, "messages[0] should be an object, got 'hi'."),
        ({"logit_bias": []}, "logit_bias should be an object, got a list of 0."),
        ({"cache_salt": ""}, "cache_salt should have at least 1 character, got ''."),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name should match the pattern '^[A-Za-z0-9_-]{1,64}$', got 'a b'.",
        ),
    ],
)
def test_types_are_named_as_json_names_them(fields, said):
    with pytest.raises(InvalidParameter) as info:
        parse_body(ChatBody, {"messages": HI, **fields})
    assert info.value.message == said


def test_a_form_is_told_the_header_to_send(harness):
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        reply = harness().request("POST", "/v1/chat/completions", content=b"{}", headers={"content-type": kind})
        message = check_error(reply, 415, "unsupported_media_type")["message"]
        assert message.endswith(f"got {kind}: send the header content-type: application/json.")


def test_a_field_that_holds_parameters_is_refused_with_their_names_here(harness):
    app = harness()
    options = {"num_predict": 9, "temperature": 0, "repeat_penalty": 1.1, "num_ctx": 4096, "stop": None}
    error = check_error(app.chat(options=options), 400, "unsupported_feature")
    assert error["param"] == "options"
    assert error["message"] == (
        "options is not served: use its fields beside it, num_predict as max_tokens, repeat_penalty as "
        "repetition_penalty, num_ctx as --max-model-len of quire serve."
    )
    inner = {"max_new_tokens": 5, "stop": ["x"]}
    for path, body, names in (
        ("/v1/completions", {"prompt": "a"}, ", max_new_tokens as max_tokens"),
        (
            "/v1/responses",
            {"input": "a"},
            ", max_new_tokens as max_output_tokens, stop as stop of POST /v1/chat/completions",
        ),
    ):
        message = check_error(app.post(path, {**body, "sampling_params": inner}), 400, "unsupported_feature")["message"]
        assert message == f"sampling_params is not served: use its fields beside it{names}."
    body = {"model": "tiny", "max_tokens": 9, "messages": HI, "extra_body": {"top_k": 5, "stop": "x"}}
    message = app.post("/v1/messages", body).json()["error"]["message"]
    assert message == "extra_body is not served: use its fields beside it, stop as stop_sequences."
    for empty in ({}, {"temperature": None}, None):
        reply = app.chat(options=empty, sampling_params=empty)
        assert (reply.status_code, reply.headers.get("x-quire-ignored")) == (200, None)


def test_a_limit_by_another_name_is_refused_unless_the_request_has_its_own(harness):
    app = harness()
    for name in ("max_new_tokens", "n_predict", "max_output_tokens"):
        error = check_error(app.chat(**{name: 5}), 400, "unsupported_feature")
        assert error["message"] == f"{name} is not served: use max_tokens."
        assert check_error(app.chat(**{name: 0}), 400, "unsupported_feature") == error
        for own in ("max_tokens", "max_completion_tokens"):
            assert app.chat(**{name: 5, own: 5}).headers["x-quire-ignored"] == name
    for name, own in (("max_tokens", "max_output_tokens"), ("stop_sequences", "stop of POST /v1/chat/completions")):
        error = check_error(app.post("/v1/responses", {"input": "a", name: [5]}), 400, "unsupported_feature")
        assert error["message"] == f"{name} is not served: use {own}."


@pytest.mark.parametrize(
    ("path", "fields", "reported"),
    [
        ("/v1/responses/input_tokens", {"input": "a", "max_tokens": 5}, "max_tokens"),
        ("/v1/responses/input_tokens", {"input": "a", "n_predict": 5, "stream": True}, "n_predict, stream"),
        ("/v1/messages/count_tokens", {"messages": HI, "stop": ["x"]}, "stop"),
    ],
)
def test_a_count_which_has_no_limits_reports_them_by_any_name(harness, path, fields, reported):
    reply = harness().post(path, {"model": "tiny", **fields})
    assert (reply.status_code, reply.headers.get("x-quire-ignored")) == (200, reported)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
def test_an_object_of_nulls_asks_for_nothing(harness, path):
    fields = {"/v1/responses": {"input": "a"}, "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": HI}}
    body = fields.get(path, {"messages": HI})
    reply = harness().post(path, {**body, "structured_outputs": {"json": None}, "what": {"a": None}})
    assert (reply.status_code, reply.headers.get("x-quire-ignored")) == (200, None)
    reply = harness().post(path, {**body, "structured_outputs": {"json": None, "other": 1}})
    assert reply.status_code == 400


def test_a_schema_of_responses_without_its_type_is_refused_not_lost(harness):
    for kind in ("text", "json_object"):
        format_ = {"type": kind, "schema": {"type": "object"}}
        reply = harness().post("/v1/responses", {"input": "a", "text": {"format": format_}})
        error = check_error(reply, 400, "invalid_parameter")
        assert error["param"] == "text.format.schema"
        assert error["message"] == f"text.format.schema needs the type json_schema, not {kind}."
    format_ = {"type": "text", "name": "n", "strict": True, "schema": None}
    reply = harness().post("/v1/responses", {"input": "a", "text": {"format": format_}})
    assert reply.headers["x-quire-ignored"] == "text.format.name, text.format.strict"


def test_0_is_named_where_it_asks_for_something(harness):
    app = harness()
    fields = {"repetition_penalty": 0, "prompt_logprobs": 0, "presence_penalty": 0, "frequency_penalty": 0.0}
    for path, body in (
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": HI}),
    ):
        assert app.post(path, {**body, **fields}).headers["x-quire-ignored"] == "prompt_logprobs, repetition_penalty"
    body = {
        "model": "tiny",
        "max_tokens": 9,
        "messages": HI,
        "parallel_tool_calls": False,
        "skip_special_tokens": False,
    }
    reply = app.post("/v1/messages", body)
    assert reply.headers["x-quire-ignored"] == "parallel_tool_calls, skip_special_tokens"


def test_metadata_and_fields_of_a_format_of_a_message_without_effect_are_named(harness):
    body = {"model": "tiny", "max_tokens": 9, "messages": HI, "metadata": {"user_id": "a", "b": "1"}}
    body["output_config"] = {"format": {"type": "json_schema", "schema": {"type": "integer"}, "strict": True}}
    assert (
        harness("1").post("/v1/messages", body).headers["x-quire-ignored"] == "output_config.format.strict, metadata.b"
    )


def test_template_variables_that_no_template_of_the_model_reads_are_named(harness):
    app = harness()
    kwargs = {"foo": 1, "bar": None, "add_vision_id": 0}
    named = "chat_template_kwargs.add_vision_id, chat_template_kwargs.foo"
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions/render", {"messages": HI}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": HI}),
        ("/tokenize", {"messages": HI}),
        ("/v1/responses/input_tokens", {"input": "a"}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": HI}),
    ):
        assert app.post(path, {**body, "chat_template_kwargs": kwargs}).headers["x-quire-ignored"] == named


def test_false_is_named_where_other_servers_take_it_for_something(harness):
    app = harness()
    fields = {"enable_thinking": False, "do_sample": False, "foo": False}
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": HI}),
    ):
        assert app.post(path, {**body, **fields}).headers["x-quire-ignored"] == "do_sample, enable_thinking"
    assert app.complete(add_special_tokens=False).headers["x-quire-ignored"] == "add_special_tokens"
    assert "x-quire-ignored" not in app.chat(add_special_tokens=False).headers  # none are added to a template's text
    assert app.chat(add_special_tokens=True).headers["x-quire-ignored"] == "add_special_tokens"
