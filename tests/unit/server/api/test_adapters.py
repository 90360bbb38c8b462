"""/v1/responses and /v1/messages over HTTP on a fake engine: answers, streams, errors, and what is not stored here."""

import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from openai.types.responses import InputTokenCountResponse, Response, ResponseStreamEvent

from engine.interface.control import Stage, State
from engine.interface.errors import EngineDead
from server.config.model_source import DEMO_FOLDER
from tests.support.client_types import check_type, named_events
from tests.unit.server.conftest import USER_HI, check_error

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
EXTRAS = frozenset({"store", "bytes", "name"})
TEXT = "Schöne Grüße, 日本語 😀!"


def respond(app, **fields):
    return app.post(RESPONSES, {"model": "tiny", "input": "hi", **fields})


def message(app, **fields):
    return app.post(MESSAGES, {"model": "tiny", "max_tokens": 99, "messages": USER_HI, **fields})


def check_anthropic_error(reply, status: int, kind: str) -> str:
    assert reply.status_code == status, reply.text
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == reply.json()["request_id"]
    error = reply.json()["error"]
    assert error["type"] == kind
    if kind != "request_too_large":  # which the package's types do not know
        check_type(ErrorResponse, reply.json())
    return error["message"]


# rule: Endpoints: Responses answer in OpenAI's form and store nothing
def test_a_response_is_openais_and_so_is_its_stream(harness):
    app = harness(TEXT, engine={"num_cached_tokens": 3})
    reply = respond(app, instructions="be nice", metadata={"a": "b"})
    answer = check_type(Response, reply.json(), extras=EXTRAS)
    assert (answer.output_text, answer.status, answer.metadata) == (TEXT, "completed", {"a": "b"})
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens == len(app.ids(TEXT))
    prompt = app.tokenizer.decode(app.client.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>system\nbe nice<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    reply = respond(app, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = named_events(reply.text)
    for _, event in events:
        check_type(ResponseStreamEvent, event, extras=EXTRAS)
    text = "".join(event["delta"] for name, event in events if name == "response.output_text.delta")
    assert text == TEXT == events[-1][1]["response"]["output"][0]["content"][0]["text"]
    assert len({event["response"]["id"] for _, event in events if "response" in event}) == 1
    assert "[DONE]" not in reply.text


# rule: Endpoints: Messages and their count answer in Anthropic's form
def test_a_message_is_anthropics_and_so_is_its_stream(harness):
    app = harness(TEXT, engine={"num_cached_tokens": 3})
    answer = check_type(Message, message(app, system="be nice").json())
    assert (answer.content[0].text, answer.stop_reason) == (TEXT, "end_turn")
    prompt = app.client.submitted[0].prompt_token_ids
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (len(prompt) - 3, 3)
    reply = message(app, stream=True)
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    events = named_events(reply.text)
    for _, event in events:
        check_type(RawMessageStreamEvent, event)
    assert "".join(event["delta"]["text"] for name, event in events if name == "content_block_delta") == TEXT
    assert events[0][1]["message"]["usage"]["cache_read_input_tokens"] == 3
    assert events[-2][1]["usage"]["output_tokens"] == len(app.ids(TEXT))


# rule: Endpoints: Messages and their count answer in Anthropic's form
def test_a_count_is_what_the_message_will_cost(harness):
    app = harness(TEXT)
    fields = {"messages": USER_HI, "system": "be nice"}
    count = check_type(MessageTokensCount, app.post(COUNT, {"model": "tiny", **fields}).json())
    assert app.client.submitted == []
    message(app, **fields)
    assert count.input_tokens == len(app.client.submitted[0].prompt_token_ids)
    long = [{"role": "user", "content": "Hello " * 500}]  # beyond the context: that is what one counts for
    assert app.post(COUNT, {"model": "tiny", "messages": long}).json()["input_tokens"] > 500
    check_anthropic_error(app.post(COUNT, {"model": "claude", "messages": long}), 404, "not_found_error")


def test_variables_of_the_template_change_a_count_as_they_change_the_prompt(harness):
    app = harness(TEXT, folder=DEMO_FOLDER)
    counts = []
    for thinks in (True, False):
        fields = {"model": "tiny", "messages": USER_HI, "chat_template_kwargs": {"enable_thinking": thinks}}
        counts.append(app.post(COUNT, fields).json()["input_tokens"])
        assert counts[-1] == app.post("/tokenize", fields).json()["count"]
    assert counts[0] < counts[1]  # an empty <think></think> turns the thinking off


# rule: Endpoints: A count of Responses' input is what the response will cost
def test_an_input_is_counted_as_the_response_will_count_it(harness):
    app = harness(TEXT)
    fields = {"input": "hi", "instructions": "be nice"}
    path = f"{RESPONSES}/input_tokens"
    reply = app.post(path, {"model": "tiny", **fields, "text": {"verbosity": "low"}, "foo": 1})
    count = check_type(InputTokenCountResponse, reply.json())
    assert reply.headers["x-quire-ignored"] == "foo, text.verbosity"
    assert app.client.submitted == []
    assert count.input_tokens == respond(app, **fields).json()["usage"]["input_tokens"]
    assert app.post(path, {"input": "Hello " * 500}).json()["input_tokens"] > 500  # beyond the context
    error = check_error(app.post(path, {"input": "hi", "previous_response_id": "r"}), 400, "unsupported_feature")
    assert error["param"] == "previous_response_id"
    assert check_error(app.post(path, {"input": []}), 400, "invalid_parameter")["param"] == "input"


def test_a_count_names_what_has_no_effect_as_the_message_does(harness):
    app = harness(TEXT)
    fields = {"model": "tiny", "messages": [{**USER_HI[0], "foo": 1}]}
    assert app.post(COUNT, {**fields, "foo": {"a": None}}).headers["x-quire-ignored"] == "messages[0].foo"
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    fields |= {"tools": tools, "tool_choice": {"type": "none"}}
    for path in (COUNT, MESSAGES):
        reply = app.post(path, {**fields, **({} if path == COUNT else {"max_tokens": 9})})
        assert reply.headers["x-quire-ignored"] == "messages[0].foo, tools"


def test_the_stop_sequence_that_was_found_is_told(harness):
    answer = message(harness("Hello, world!"), stop_sequences=["zzz", "world"]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "world")
    assert answer["content"][0]["text"] == "Hello, "


def test_max_tokens_beyond_the_context_are_no_error_for_messages_alone(harness):
    app = harness(long_text := "Hello " * 300)
    answer = message(app, max_tokens=32_000).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    request = app.client.submitted[0]
    assert len(request.prompt_token_ids) + request.params.max_tokens == 256
    assert message(app, max_tokens=3).json()["stop_reason"] == "max_tokens"
    error = check_error(respond(app, max_output_tokens=32_000), 400, "context_length_exceeded")
    assert error["param"] == "max_output_tokens"
    assert check_error(respond(app, input=long_text), 400, "context_length_exceeded")["param"] == "input"
    told = check_anthropic_error(
        message(app, messages=[{"role": "user", "content": long_text}]), 400, "invalid_request_error"
    )
    assert told.startswith("prompt is too long")


def test_the_last_message_is_gone_on_with(harness):
    app = harness("B)")
    message(app, messages=[*USER_HI, {"role": "assistant", "content": "The answer is ("}])
    prompt = app.tokenizer.decode(app.client.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nThe answer is (")


def test_ignored_fields_are_named_in_the_header_or_refused(harness):
    reply = respond(harness(), store=True, foo=1)
    assert reply.headers["x-quire-ignored"] == "foo, store"
    reply = message(harness(), stream=True, foo=1)
    assert reply.headers["x-quire-ignored"] == "foo"
    assert "x-quire-ignored" not in respond(harness(), store=False).headers
    assert check_error(respond(harness(strict=True), store=True), 400, "invalid_parameter")["param"] == "store"
    assert "foo" in check_anthropic_error(message(harness(strict=True), foo=1), 400, "invalid_request_error")


def test_log_probabilities_come_when_included(harness):
    app = harness("é!")
    [part] = respond(app, include=["message.output_text.logprobs"], top_logprobs=2).json()["output"][0]["content"]
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == "é!"
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


# rule: Endpoints: Responses answer in OpenAI's form and store nothing
@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("path", ["resp_1", "resp_1/input_items"])
def test_nothing_is_stored(harness, method, path):
    error = check_error(harness().get(f"{RESPONSES}/{path}", method), 404, "not_found")
    assert "stores none" in error["message"]


# rule: Errors: Every path answers errors in OpenAI's form as JSON; Anthropic's paths in Anthropic's
def test_errors_have_the_form_of_the_path(harness):
    app = harness(max_body_bytes=1000, launcher=None)
    check_anthropic_error(message(app, model="claude"), 404, "not_found_error")
    check_anthropic_error(message(app, max_tokens=0), 400, "invalid_request_error")
    check_anthropic_error(app.post(MESSAGES, content=b"{}"), 415, "invalid_request_error")
    check_anthropic_error(message(app, system="x" * 2000), 413, "request_too_large")
    check_anthropic_error(app.post(COUNT, {"model": "tiny"}), 400, "invalid_request_error")
    check_anthropic_error(app.get(MESSAGES), 405, "invalid_request_error")
    check_anthropic_error(app.post(f"{MESSAGES}/batches", {}), 404, "not_found_error")
    check_error(respond(app, model="gpt"), 404, "model_not_found")
    check_error(respond(app, background=True), 400, "unsupported_feature")
    check_error(app.post("/v1/messages_of_others", {}), 404, "not_found")
    app.launcher.state = State(Stage("weights"), False)
    check_anthropic_error(message(app), 503, "overloaded_error")
    check_error(respond(app), 503, "not_ready")


def test_an_error_before_the_first_token_is_a_status(harness):
    app = harness(TEXT, engine={"fail": EngineDead("The engine died.")})
    check_error(respond(app, stream=True), 503, "engine_dead")
    check_anthropic_error(message(app, stream=True), 503, "overloaded_error")


def test_an_error_after_it_is_an_event(harness):
    app = harness(TEXT, engine={"fail": EngineDead("The engine died."), "fail_after": 3})
    events = named_events(respond(app, stream=True).text)
    assert [name for name, _ in events][-2:] == ["error", "response.failed"]
    assert events[-1][1]["response"]["error"]["message"] == "The engine died."
    events = named_events(message(app, stream=True).text)
    assert events[-1][0] == "error"
    assert events[-1][1]["error"] == {"type": "overloaded_error", "message": "The engine died."}


def test_the_openapi_document_has_the_bodies(harness):
    document = harness().get("/openapi.json").json()
    for path, name in ((RESPONSES, "ResponsesBody"), (MESSAGES, "MessagesBody"), (COUNT, "CountTokensBody")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert name in document["components"]["schemas"]
