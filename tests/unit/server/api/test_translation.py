"""What the adapters share: names of fields told in the client's words, and reasoning that comes back sealed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.as_chat import rename_fields, seal, unseal


@given(st.text(st.characters(codec="utf-8")))
def test_what_is_sealed_can_be_opened(value):
    assert unseal(seal(value)) == value


@given(st.text())
def test_opening_what_others_sealed_gives_nothing(value):
    assert unseal("gAAAAA" + value) is None
    assert isinstance(unseal("quire1." + value), str | None)  # broken, but no failure of ours


NAMES = {"messages": "input", "messages[1]": "input[7]", "tools[0].function": "tools[3]"}


@pytest.mark.parametrize(
    ("told", "renamed_to"),
    [
        ("messages[1].content is odd.", "input[7].content is odd."),
        ("messages[10].content is odd.", "input[10].content is odd."),
        ("tools[0].function.name is odd, tools[1] is not.", "tools[3].name is odd, tools[1] is not."),
        ("my_messages, old.messages: no fields of ours.", "my_messages, old.messages: no fields of ours."),
        ("messages.", "input."),
    ],
)
def test_the_longest_known_part_of_a_path_is_renamed(told, renamed_to):
    assert rename_fields(told, NAMES) == renamed_to


@given(st.text())
def test_without_names_nothing_is_renamed(text):
    assert rename_fields(text, {}) == text
