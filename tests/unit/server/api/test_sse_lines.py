"""An event of a stream is one line, also for clients that end lines where str.splitlines() does."""

from __future__ import annotations

import json

import msgspec
import pytest

from engine.interface.errors import RequestError
from server.api.sse import ReplyHead, TextEvent, data_events, data_failure, named_event

TEXT = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\r\n\u00e4\u4e2d"


class Named(msgspec.Struct, tag="named"):
    text: str


@pytest.mark.parametrize(
    "event",
    [
        data_events(ReplyHead(id="1", created=1, model=TEXT)),
        TextEvent(data_events(ReplyHead(id="1", created=1, model=TextEvent.TEXT)))(TEXT),
        named_event(Named(TEXT)),
        data_failure(RequestError(TEXT), request_id="r"),
    ],
    ids=["data", "text", "named", "failure"],
)
def test_an_event_is_one_line(event: bytes) -> None:
    lines = [line for line in event.decode().splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    assert len(lines) == 1
    texts = _texts(json.loads(lines[0].removeprefix("data: ")))
    assert any(str(text).startswith(TEXT[:7]) for text in texts)


def _texts(value: object) -> list[object]:
    return [text for each in value.values() for text in _texts(each)] if isinstance(value, dict) else [value]
