"""What the benchmark of kills says of streams: which were cut, which differ, and how long they paused."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.kills import Kill, Streamed, Tally, added, earlier_tally, figures, requests, spread, tally


def stream(kind: str, *events: tuple[float, object], begun_s: float = 0.0, status: int = 200) -> Streamed:
    made = Streamed(kind, begun_s, status)
    for at_s, event in events:
        made.take(event if isinstance(event, bytes) else json.dumps(event).encode(), at_s)
    return made


def delta(text: str, index: int = 0) -> dict:
    return {"choices": [{"index": index, "delta": {"content": text}}]}


def test_a_stream_is_whole_with_its_last_event_and_has_its_text_by_choice() -> None:
    whole = stream("n = 3", (1, delta("a")), (2, delta("x", 1)), (3, delta("b")), (4, b"[DONE]"))
    assert whole.is_whole
    assert sorted(whole.texts.values()) == ["ab", "x"]
    assert stream("Responses", (1, {"type": "response.incomplete", "response": {}})).is_whole
    assert stream("Messages", (1, {"type": "message_stop"})).is_whole
    assert not stream("plain", (1, delta("a"))).is_whole
    failed = stream("plain", (1, {"error": {"code": "engine_dead"}}), (2, b"[DONE]"))
    assert (failed.is_whole, failed.error) == (False, "engine_dead")


def test_figures_tell_cut_and_different_streams_and_pauses_from_the_kill_on() -> None:
    streams = [
        stream("plain", (1.0, delta("ab")), (6.0, delta("c")), (6.1, b"[DONE]")),
        stream("plain", (1.0, delta("ab")), (3.05, delta("late")), (8.0, b"[DONE]")),  # on its way at the kill
        stream("plain", (1.0, delta("abc"))),
        stream("plain", (9.0, delta("abc")), (9.1, b"[DONE]"), begun_s=7.0),
        stream("plain", status=503),
    ]
    one = tally(streams, [Kill(3.0, 5.0, 2.0)], {"plain": streams[0].texts})
    found = figures(one)
    assert (found["streams"], found["cut"], found["different"]) == (4, 1, 1)
    assert found["refused_without_an_engine"] == 1
    assert found["streams_open_at_a_kill"] == 2
    assert found["without_an_engine_s"] == {"p50": 2.0, "p99": 2.0, "max": 2.0}
    assert found["until_the_first_stream_goes_on_s"]["p50"] == 3.0
    assert found["pause_of_a_stream_s"] == {"p50": 3.0, "p99": 5.0, "max": 5.0}
    both = figures(added(one, added(Tally(), one)))
    assert (both["kills"], both["streams"], both["cut"], both["different"]) == (2, 8, 2, 2)
    assert both["streams_open_at_a_kill"] == 4


def test_spread_and_kinds() -> None:
    assert spread([]) == {}
    assert spread([float(number) for number in range(1, 201)]) == {"p50": 100.0, "p99": 198.0, "max": 200.0}
    assert len(requests(30)) == 9


def test_a_run_goes_on_with_a_file_of_the_same_settings_alone(tmp_path: Path) -> None:
    path, identity = tmp_path / "kills.json", {"settings": {"streams": 2}, "server_flags": []}
    assert earlier_tally(path, identity) == Tally()
    saved = Tally(cut=1, without_an_engine_s=[1.5])
    path.write_text(json.dumps({**identity, "tally": msgspec.to_builtins(saved)}))
    assert earlier_tally(path, identity) == saved
    with pytest.raises(ValueError, match="other settings"):
        earlier_tally(path, identity | {"server_flags": ["--standby"]})
