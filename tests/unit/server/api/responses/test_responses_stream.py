"""Events of a chat become an OpenAI Response: the order of a stream's events, and the whole answer as their fold."""

import json

import msgspec
import openai
import pytest
from hypothesis import given, settings
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from engine.interface.errors import EngineDead, InvalidParameter, Overloaded, ServiceError
from engine.interface.protocol import TokenLogprobs
from server.api.as_chat import unseal
from server.api.objects import ChatTokenLogprob
from server.api.responses.objects import ReasoningEcho, ResponsesEcho, TextEcho
from server.api.responses.writer import ResponsesWriter
from server.generation.events import ChoiceFinished, TextDelta
from tests.support.chat_script import HEAD, Said, ScriptedChat, events_of, joined, scripts
from tests.support.client_types import check_type, named_events

EXTRAS = frozenset({"store", "bytes", "name"})
ADDED, DONE = "response.output_item.added", "response.output_item.done"
PART_ADDED, PART_DONE = "response.content_part.added", "response.content_part.done"
TEXT, TEXT_DONE = "response.output_text.delta", "response.output_text.done"
THOUGHT, THOUGHT_DONE = "response.reasoning_text.delta", "response.reasoning_text.done"
ARGUMENTS, ARGUMENTS_DONE = "response.function_call_arguments.delta", "response.function_call_arguments.done"
OPENING = ["response.created", "response.in_progress"]


def make_writer(*, logprobs=None, is_sealed: bool = False, is_summary: bool = False, **counts: int) -> ResponsesWriter:
    echo = ResponsesEcho(reasoning=ReasoningEcho(), text=TextEcho({"type": "text"}))
    return ResponsesWriter(
        HEAD, echo, generation=ScriptedChat(**counts), logprobs=logprobs, is_sealed=is_sealed, is_summary=is_summary
    )


def stream(events: list, writer: ResponsesWriter | None = None) -> list[tuple[str, dict]]:
    writer = writer or make_writer()
    parts = [writer.opening(), *(writer.event(event, is_last=False) for event in events), writer.closing()]
    return named_events(b"".join(parts).decode())


def whole(events: list, writer: ResponsesWriter | None = None) -> dict:
    answer = (writer or make_writer()).whole(events)
    return json.loads(msgspec.json.encode(answer))


def test_a_text_answer_has_openais_events_in_order():
    events = stream(events_of([Said("text", ("Hel", "lo"))]))
    names = [name for name, _ in events]
    assert names == [*OPENING, ADDED, PART_ADDED, TEXT, TEXT, TEXT_DONE, PART_DONE, DONE, "response.completed"]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert [event["delta"] for name, event in events if name == TEXT] == ["Hel", "lo"]
    added, done = events[2][1]["item"], events[-2][1]["item"]
    assert (added["content"], added["status"], done["status"]) == ([], "in_progress", "completed")
    assert done["content"][0]["text"] == events[-4][1]["text"] == "Hello"
    assert events[-1][1]["response"]["output"] == [done]


def test_reasoning_text_and_calls_are_items_one_after_the_other():
    script = [Said("reasoning", ("hm",)), Said("text", ("ok",)), Said("f", ('{"a"', ": 1}")), Said("g", ("{}",))]
    events = stream(events_of(script, "tool_calls"))
    assert [name for name, _ in events][2:-1] == [
        *(ADDED, PART_ADDED, THOUGHT, THOUGHT_DONE, PART_DONE, DONE),
        *(ADDED, PART_ADDED, TEXT, TEXT_DONE, PART_DONE, DONE),
        *(ADDED, ARGUMENTS, ARGUMENTS, ARGUMENTS_DONE, DONE),
        *(ADDED, ARGUMENTS, ARGUMENTS_DONE, DONE),
    ]
    assert [event["output_index"] for name, event in events if name == ADDED] == [0, 1, 2, 3]
    output = events[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["id"][:3] for item in output] == ["rs_", "msg", "fc_", "fc_"]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output[2:]] == [
        ("call_0", "f", '{"a": 1}'),
        ("call_1", "g", "{}"),
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert output[0]["summary"] == []


def test_a_call_without_arguments_has_an_empty_object():
    events = stream(events_of([Said("f", ())], "tool_calls"))
    assert [event["delta"] for name, event in events if name == ARGUMENTS] == ["{}"]
    assert events[-1][1]["response"]["output"][0]["arguments"] == "{}"


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 5)
@given(script=scripts)
def test_any_stream_has_valid_events_and_ends_as_the_whole_answer(script):
    events = stream(events_of(script))
    state = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for _, event in events:
        state.handle_event(check_type(ResponseStreamEvent, event, extras=EXTRAS))  # the client's own bookkeeping
    answer = whole(events_of(script))
    check_type(Response, answer, extras=EXTRAS)
    last = events[-1][1]["response"]
    seen = []
    for item, other in zip(last["output"], answer["output"], strict=True):
        assert {**item, "id": ""} == {**other, "id": ""}
        if item["type"] == "function_call":
            seen.append((item["name"], item["arguments"]))
        else:
            seen.append(("text" if item["type"] == "message" else "reasoning", item["content"][0]["text"]))
    assert seen == (joined(script) or [("text", "")])


def test_an_answer_that_is_cut_off_is_incomplete():
    events = stream(events_of([Said("text", ("a",)), Said("reasoning", ("b",))], "length"))
    name, event = events[-1]
    response = event["response"]
    assert (name, response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert whole(events_of([Said("text", ("a",))], "length"))["status"] == "incomplete"


def test_a_call_that_the_model_left_unfinished_is_incomplete():
    events = stream(events_of([Said("f", ("{}",)), Said("g", ('{"a": ',))], "stop"))
    name, event = events[-1]
    assert name == "response.completed"  # nothing cut the answer off
    assert [item["status"] for item in event["response"]["output"]] == ["completed", "incomplete"]


def test_usage_counts_what_was_cached_and_what_was_thought():
    usage = whole(events_of([Said("text", ("a",))]))["usage"]
    assert usage == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }


def test_reasoning_is_sealed_if_asked_for():
    [item] = whole(events_of([Said("reasoning", ("hm ", "日本"))]), make_writer(is_sealed=True))["output"]
    assert unseal(item["encrypted_content"]) == "hm 日本"
    [item] = whole(events_of([Said("reasoning", ("hm",))]))["output"]
    assert item["encrypted_content"] is None


def test_reasoning_is_its_own_summary_if_one_is_asked_for():
    """Codex and others show summaries alone."""
    script = [Said("reasoning", ("a", "b")), Said("text", ("ok",))]
    events = stream(events_of(script), make_writer(is_summary=True))
    for _, event in events:
        check_type(ResponseStreamEvent, event, extras=EXTRAS)
    part, text = "response.reasoning_summary_part", "response.reasoning_summary_text"
    assert [name for name, _ in events][2:9] == [
        *(ADDED, f"{part}.added", f"{text}.delta", f"{text}.delta", f"{text}.done", f"{part}.done", DONE),
    ]
    item = events[-1][1]["response"]["output"][0]
    assert (item["summary"], item["content"]) == ([{"type": "summary_text", "text": "ab"}], [])


def test_log_probabilities_of_tokens_without_text_are_not_lost():
    def logprobs(event: TextDelta) -> list[ChatTokenLogprob]:
        return [ChatTokenLogprob(f"t{id_}", -0.5, [1], []) for id_ in event.token_ids]

    entry = [TokenLogprobs(-0.5, [], [])]
    events = [
        TextDelta(0, "text", "", [1], entry),
        TextDelta(0, "text", "é", [2], entry),
        TextDelta(0, "text", "", [3], entry),
    ]
    events.append(ChoiceFinished(0, "stop"))
    [item] = whole(events, make_writer(logprobs=logprobs))["output"]
    assert [entry["token"] for entry in item["content"][0]["logprobs"]] == ["t1", "t2", "t3"]
    deltas = [event for name, event in stream(events, make_writer(logprobs=logprobs)) if name == TEXT]
    assert [[entry["token"] for entry in delta["logprobs"]] for delta in deltas] == [["t1", "t2"], ["t3"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDead("The engine died."), "server_error"),
        (Overloaded("The queue is full."), "rate_limit_exceeded"),
        (InvalidParameter("temperature is odd.", param="temperature"), "invalid_prompt"),
        (ServiceError("secret"), "server_error"),
    ],
)
def test_an_error_ends_the_stream_as_an_event_and_a_failed_response(error, code):
    writer = make_writer()
    head = writer.opening() + writer.event(TextDelta(0, "text", "Hel", [1], None), is_last=False)
    events = named_events((head + writer.failed(error, request_id="req-1")).decode())
    for _, event in events:
        check_type(ResponseStreamEvent, event, extras=EXTRAS)
    assert [name for name, _ in events][-5:] == [TEXT_DONE, PART_DONE, DONE, "error", "response.failed"]
    assert (events[-2][1]["code"], events[-2][1]["param"]) == (error.code, error.param)
    response = events[-1][1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    assert response["output"][0]["content"][0]["text"] == "Hel"
    assert "secret" not in json.dumps(events)
