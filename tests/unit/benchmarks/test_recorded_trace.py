"""Recorded traces: the tokens drawn for them have the prefixes of the recording, and no others."""

import json

import pytest

from benchmarks.recorded_trace import FOLDER, Row, draw_conversations, len_of, num_common_tokens, read_rows

ROWS = [
    Row(0, 0.0, -1, 0, 8, 4),
    Row(0, 2.5, 0, 12, 3, 5),  # goes on from the answer
    Row(1, 1.0, 0, 6, 4, 2),  # has the same system prompt
    Row(0, 0.5, 0, 9, 3, 1),  # back to the first answer, which it does not finish
]


def num_common(first, second):
    """Return the length of the longest common prefix."""
    num_both = min(len(first), len(second))
    return next((place for place in range(num_both) if first[place] != second[place]), num_both)


def asked(conversations):
    return [request for _, conversation in conversations for request in conversation.asked]


def test_prompts_begin_like_the_requests_that_they_follow():
    first, again, back, other = asked(draw_conversations(ROWS, num_copies=1, seed=1))
    assert [len(prompt) for prompt, _ in (first, again, back, other)] == [8, 15, 12, 10]
    assert [len(answer) for _, answer in (first, again, back, other)] == [4, 5, 1, 2]
    assert again[0][:12] == first[0] + first[1]
    assert num_common(first[0] + first[1], back[0]) == 9
    assert num_common(first[0], other[0]) == 6


def test_copies_are_other_conversations_with_the_same_beginning():
    assert num_common_tokens(ROWS) == {0: 6, 1: 6}
    begun = draw_conversations(ROWS, num_copies=2, seed=1)
    assert [begin_s for begin_s, _ in begun] == [0.0, 0.5, 1.0, 1.5]
    requests = asked(begun)
    assert len(requests) == 2 * len(ROWS)
    prompts = [prompt for prompt, _ in requests]
    assert [num_common(prompts[0], prompt) for prompt in prompts[3:]] == [6] * 5


def test_a_conversation_asks_in_order_and_waits_as_recorded():
    (_, conversation), _ = draw_conversations(ROWS, num_copies=1, seed=1)
    waits_s = []
    while (request := conversation.next_request()) is not None:
        assert request == conversation.asked[len(waits_s)]
        waits_s.append(conversation.wait_s(None))
    assert waits_s == [2.5, 0.5, 0.0]


@pytest.mark.parametrize("row", [(0, 0, 1, 0, 1, 1), (0, 0, 0, 13, 1, 1), (0, 0, 0, 1, 0, 1), (0, 0, -1, 1, 1, 1)])
def test_a_row_that_follows_nothing_is_refused(tmp_path, row):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"requests": [ROWS[0], row]}))
    with pytest.raises(ValueError, match=r"trace\.json: row 1 "):
        read_rows(path)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_traces_are_small_and_name_their_source_and_licence(path):
    about = json.loads(path.read_text())
    assert path.stat().st_size < 300_000
    assert about["columns"] == list(Row._fields)
    assert all(about[name] for name in ("source", "licence", "tokens", "what"))
    rows = read_rows(path)
    assert all(len_of(rows, number) > row.num_shared for number, row in enumerate(rows))
