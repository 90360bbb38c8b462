"""Events of a chat become an Anthropic Message: the order of a stream's events, and the whole answer as their fold."""

import json

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from hypothesis import given, settings

from engine.interface.errors import EngineDead, InvalidParameter, Overloaded, PromptTooLong, ServiceError
from server.api.as_chat import unseal
from server.api.messages.objects import TextContent, ThinkingContent
from server.api.messages.writer import _CONTENT, MessagesWriter
from server.generation.events import TextDelta, ToolArguments
from tests.support.chat_script import HEAD, Said, ScriptedChat, events_of, joined, scripts
from tests.support.client_types import check_type, named_events

START, DELTA, STOP = "content_block_start", "content_block_delta", "content_block_stop"


def make_writer(*, max_tokens: int = 7, omits_thinking: bool = False, **counts: int) -> MessagesWriter:
    generation = ScriptedChat(**counts)
    return MessagesWriter(HEAD, generation=generation, max_tokens=max_tokens, omits_thinking=omits_thinking)


def stream(events: list, writer: MessagesWriter | None = None) -> list[tuple[str, dict]]:
    writer = writer or make_writer()
    parts = [writer.opening(), *(writer.event(event, is_last=False) for event in events), writer.closing()]
    return named_events(b"".join(parts).decode())


def whole(events: list, writer: MessagesWriter | None = None) -> dict:
    return json.loads(msgspec.json.encode((writer or make_writer()).whole(events)))


def deltas(events: list[tuple[str, dict]]) -> list[tuple[str, str]]:
    """Return the kind and text of each delta."""
    return [tuple(event["delta"].values()) for name, event in events if name == DELTA]


def test_a_text_answer_has_anthropics_events_in_order():
    events = stream(events_of([Said("text", ("Hel", "lo"))]))
    assert [name for name, _ in events] == [
        *("message_start", START, DELTA, DELTA, STOP, "message_delta", "message_stop")
    ]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert deltas(events) == [("text_delta", "Hel"), ("text_delta", "lo")]
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_thinking_text_and_tools_are_blocks_one_after_the_other():
    script = [Said("reasoning", ("hm",)), Said("text", ("ok",)), Said("f", ('{"a"', ": 1}")), Said("g", ())]
    events = stream(events_of(script, "tool_calls"))
    assert [event["index"] for name, event in events if name == START] == [0, 1, 2, 3]
    assert deltas(events) == [
        ("thinking_delta", "hm"),
        ("signature_delta", "quire"),
        ("text_delta", "ok"),
        ("input_json_delta", '{"a"'),
        ("input_json_delta", ": 1}"),
    ]
    blocks = [event["content_block"] for name, event in events if name == START]
    assert blocks[2] == {"type": "tool_use", "id": "call_0", "name": "f", "input": {}}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    answer = whole(events_of(script, "tool_calls"))
    assert answer["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "quire"},
        {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "call_0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_1", "name": "g", "input": {}},
    ]


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 5)
@given(script=scripts)
def test_any_stream_has_valid_events_and_ends_as_the_whole_answer(script):
    events = stream(events_of(script))
    message, buffers = None, {}
    for name, event in events:
        parsed = check_type(RawMessageStreamEvent, event)
        if name != "message_stop":  # the client's own bookkeeping
            message = accumulate_event(event=parsed, current_snapshot=message, json_bufs=buffers)
    answer = check_type(Message, whole(events_of(script)))
    assert [block.to_dict() for block in message.content] == [block.to_dict() for block in answer.content]
    assert (message.stop_reason, message.usage) == (answer.stop_reason, answer.usage)
    seen = []
    for block in answer.content:
        if block.type == "tool_use":
            seen.append((block.name, block.input))
        else:
            seen.append(("text", block.text) if block.type == "text" else ("reasoning", block.thinking))
    expected = [(kind, json.loads(text) if kind.startswith("tool_") else text) for kind, text in joined(script)]
    assert seen == (expected or [("text", "")])


@pytest.mark.parametrize(
    ("finish_reason", "stop_string", "max_tokens", "reason"),
    [
        ("stop", None, 7, "end_turn"),
        ("stop", "###", 7, "stop_sequence"),
        ("tool_calls", None, 7, "tool_use"),
        ("length", None, 7, "max_tokens"),
        ("length", None, 8, "model_context_window_exceeded"),
    ],
)
def test_why_an_answer_ended_is_told(finish_reason, stop_string, max_tokens, reason):
    script = [Said("text", ("a",))]
    answer = whole(events_of(script, finish_reason, stop_string), make_writer(max_tokens=max_tokens))
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop_string)
    events = stream(events_of(script, finish_reason, stop_string), make_writer(max_tokens=max_tokens))
    assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": stop_string}


def test_usage_counts_cached_tokens_apart():
    assert whole(events_of([Said("text", ("a",))]))["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_omitted_thoughts_are_in_the_signature():
    script = [Said("reasoning", ("hm ", "日本")), Said("text", ("ok",))]
    events = stream(events_of(script), make_writer(omits_thinking=True))
    [(_, signature)] = [delta for delta in deltas(events) if delta[0] != "text_delta"]
    assert unseal(signature) == "hm 日本"
    [block, _] = whole(events_of(script), make_writer(omits_thinking=True))["content"]
    assert (block["thinking"], block["signature"]) == ("", signature)


def test_arguments_outside_of_a_call_begin_no_call_and_change_no_block():
    """They are a fault of ours; a call is never made up, which would have neither id nor name."""
    writer = make_writer()
    writer.event(TextDelta(0, "text", "ok", [1], None), is_last=False)
    with pytest.raises(AssertionError, match="outside of a call"):
        writer.event(ToolArguments(0, 0, "{}"), is_last=False)
    assert whole(events_of([]), writer)["content"] == [{"type": "text", "text": "ok"}]
    assert set(_CONTENT.values()) == {TextContent, ThinkingContent}


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "nonsense"])
def test_arguments_that_are_no_object_are_kept(arguments):
    [block] = whole(events_of([Said("f", (arguments,))], "length"))["content"]
    assert block["input"] == {"unparsed": arguments}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineDead("The engine died."), "overloaded_error"),
        (Overloaded("The queue is full."), "rate_limit_error"),
        (InvalidParameter("temperature is odd."), "invalid_request_error"),
        (PromptTooLong("The prompt has 9 tokens, the limit is 8."), "invalid_request_error"),
        (ServiceError("secret"), "api_error"),
    ],
)
def test_an_error_is_the_last_event_of_a_stream(error, kind):
    [(name, event)] = named_events(make_writer().failed(error, request_id="req-1").decode())
    assert (name, event["error"]["type"], event["request_id"]) == ("error", kind, "req-1")
    check_type(ErrorResponse, event)
    assert "secret" not in event["error"]["message"]
    assert event["error"]["message"].startswith("prompt is too long") == isinstance(error, PromptTooLong)
