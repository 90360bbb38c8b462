"""Streams: whatever tokens come, in whatever portions, the events are whole and sum up to the whole answer."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config.model_source import resolve_model
from tests.fuzz.conftest import seeds
from tests.fuzz.counts import count
from tests.support.fakes import READY, FakeEngineClient, FakeLauncherChannel
from tests.unit.server.conftest import Harness, chat_text, stream_chunks, write_model_folder

TEXTS = [path.read_bytes().decode() for path in seeds("texts")]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


TEMPLATE = Path(resolve_model(None).folder) / "chat_template.jinja"  # of a model that thinks and calls tools


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = write_model_folder(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE.read_text(encoding="utf-8"))
    return Harness(
        folder, FakeEngineClient(ready=msgspec.structs.replace(READY, max_model_len=4096)), FakeLauncherChannel()
    )


def answers(app: Harness, ids: list[int], size: int, **fields: object) -> tuple[dict, list[dict]]:
    """Return one answer whole, and its stream's chunks."""
    app.client.script, app.client.tokens_per_delta = ids, size
    whole, streamed = app.chat(max_tokens=200, **fields), app.chat(max_tokens=200, stream=True, **fields)
    count("answers of any tokens, whole and streamed", [whole.status_code, streamed.status_code])
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text
    return whole.json(), stream_chunks(streamed.text)


STOPS = st.lists(st.text(alphabet="abe <|>\n😀", min_size=1, max_size=4), max_size=4)


# rule: Streams: The chunks joined are the whole answer
@given(st.lists(st.integers(3, 420), max_size=40), st.integers(1, 7), STOPS, st.booleans(), st.booleans())
def test_any_tokens_are_one_answer_whole_or_streamed(app, ids, size, stops, shown, skipped):
    fields = {"include_stop_str_in_output": shown, "skip_special_tokens": skipped} | ({"stop": stops} if stops else {})
    whole, chunks = answers(app, ids, size, **fields)
    choice = whole["choices"][0]
    assert chat_text(chunks) == choice["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == choice["finish_reason"]
    if not shown:
        assert not any(stop in choice["message"]["content"] for stop in stops)


TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "get_weather", "arguments": {}}',
    "{",
    "}",
    '"',
    "\n",
]
WRITTEN = st.lists(st.sampled_from([*TAGS, *TEXTS]) | st.text(max_size=6), max_size=8).map("".join)


# rule: Tools and reasoning: A stream with tools joins to the whole answer, however the text is cut
@given(WRITTEN, st.integers(1, 9), st.booleans())
def test_any_text_with_tools_is_one_answer_whole_or_streamed(app, text, size, is_thinking):
    ids = [id_ for id_ in app.ids(text) if id_ > 2][:200]
    app.client.script, app.client.tokens_per_delta = ids, size
    if app.chat(tools=[TOOL]).status_code == 400:
        pytest.skip("tools are not served")
    whole, chunks = answers(app, ids, size, tools=[TOOL], chat_template_kwargs={"enable_thinking": is_thinking})
    message = whole["choices"][0]["message"]
    assert chat_text(chunks) == (message["content"] or "")
    assert streamed(chunks, "reasoning_content") == (message.get("reasoning_content") or "")
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                name, arguments = calls.setdefault(call["index"], ["", ""])
                function = call["function"]
                calls[call["index"]] = [name + function.get("name", ""), arguments + function.get("arguments", "")]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    expected = [[function["name"], function["arguments"]] for function in functions]
    assert list(calls.values()) == expected
    for _, arguments in expected[:-1]:  # the end may have cut the last one
        assert isinstance(json.loads(arguments), dict)


def streamed(chunks: list[dict], key: str) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get(key) or "" for delta in deltas)
