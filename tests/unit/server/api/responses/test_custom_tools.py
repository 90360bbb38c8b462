"""The input of a custom tool is read out of its call's arguments, however they are cut and whatever the model wrote."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.responses.custom_tools import CustomInput, arguments_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def read(arguments: str, cuts: list[int]) -> tuple[list[str], str]:
    """Return the pieces of the input that came while the arguments did, and the input."""
    ends = sorted({min(cut, len(arguments)) for cut in cuts} | {len(arguments)})
    custom, start, pieces = CustomInput(), 0, []
    for end in ends:
        pieces.append(custom.push(arguments[start:end]))
        start = end
    pieces.append(custom.finish())
    assert "".join(pieces) == custom.text
    return pieces, custom.text


@given(text=TEXTS, is_ascii=st.booleans(), indent=st.sampled_from([None, 2]), cuts=st.lists(st.integers(0, 200)))
def test_any_input_comes_whole_however_it_is_cut(text, is_ascii, indent, cuts):
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii, indent=indent)
    pieces, whole = read(arguments, cuts)
    assert whole == text
    assert pieces[-1] == ""  # nothing waits for the end


@given(text=TEXTS)
def test_the_history_has_the_same_arguments(text):
    assert read(arguments_of(text), [])[1] == text


def test_the_input_comes_as_it_is_written():
    pieces, _ = read(json.dumps({"input": "abc"}), list(range(20)))
    assert [piece for piece in pieces if piece] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ("{}", ""),
        ('{"patch": "x"}', "x"),
        ('{"a": "x", "input": "y"}', "y"),
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('["x"]', '["x"]'),
        ('{"input": "x", "more": 1}', "x"),
        ('{"input": "a\\ud83d"}', "a\ufffd"),
        ('{"input": "a\\ud83db"}', "a\ufffdb"),
        ('{"input": "a\nb\tc"}', "a\nb\tc"),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\u00', "cut"),
        ('{"input": "bad \\x escape"}', "bad "),
        ("{" * 5000, "{" * 5000),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_other_arguments_lose_nothing_that_can_be_read(arguments, text, size):
    assert read(arguments, list(range(0, len(arguments), size)))[1] == text
