"""Parts of `quire chat` without a terminal: the session, Markdown cut into blocks, a stream's lines."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.commands.chat.client import data_lines
from server.commands.chat.session import COMMANDS, ChatError, Message, Session, follow
from server.commands.chat.terminal import split_complete
from server.commands.server_target import printable


@pytest.fixture
def session():
    made = Session("m", system="Be kind.", settings={"temperature": 0.5, "thinking": "hidden"})
    made.messages = [Message("user", "a"), Message("assistant", "b")]
    made.last_question = "a"
    return made


def test_a_body_has_system_history_and_question_and_no_settings_of_the_screen(session):
    assert session.body("c") == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be kind."}, Message("user", "a"), Message("assistant", "b"),
            Message("user", "c"),
        ],
        "temperature": 0.5,
    }  # fmt: skip


def test_a_chat_comes_back_as_it_was_saved(session, tmp_path):
    path = session.save(str(tmp_path / "chat.json"))
    other = Session("n", system=None, settings={})
    other.load(str(path))
    assert (other.model, other.system, other.settings) == ("n", "Be kind.", session.settings)
    assert (other.messages, other.last_question) == (session.messages, "a")
    session.save(str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["chat.json"]


@pytest.mark.parametrize(
    "content",
    [
        "buy bread", "{}", '{"quire_chat": 2}',
        json.dumps({"quire_chat": 1, "model": "m", "system": None, "settings": {"top_k": "x"}, "messages": []}),
        json.dumps({"quire_chat": 1, "model": "m", "system": None, "settings": {},
                    "messages": [{"role": "assistant", "content": "x"}]}),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_neither_loaded_nor_replaced(session, tmp_path, content):
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ChatError):
        session.load(str(path))
    assert session.messages[0].content == "a"
    assert session.settings == {"temperature": 0.5, "thinking": "hidden"}
    if "messages" not in content:
        with pytest.raises(ChatError, match="is no chat"):
            session.save(str(path))
        assert path.read_text() == content


def test_files_that_cannot_be_opened_are_named(session):
    for command in ("/load /nowhere/x", "/save /nowhere/x"):
        with pytest.raises(ChatError, match="/nowhere/x cannot be"):
            follow(session, command)


def test_a_question_is_taken_back_once_and_can_be_asked_again(session):
    assert follow(session, "/retry").question == "a"
    assert session.messages == []
    assert follow(session, "/retry").question == "a"  # its answer may have failed
    session.clear()
    with pytest.raises(ChatError):
        follow(session, "/retry")


@pytest.mark.parametrize(
    ("typed", "value"),
    [("temperature 1.5", 1.5), ("seed=-4", -4), ("max_tokens = 7", 7), ("markdown off", "off"), ("top_k  8", 8)],
)
def test_settings_take_checked_values(session, typed, value):
    name = typed.replace("=", " ").split()[0]
    follow(session, f"/set {typed}")
    assert session.settings[name] == value
    follow(session, f"/set {name} default")
    assert name not in session.settings


@pytest.mark.parametrize(
    "typed", ["temperature nan", "top_p 2", "seed 1.5", "max_tokens 0", "thinking loud", "colour red", "temperature"]
)
def test_wrong_settings_are_refused_and_change_nothing(session, typed):
    before = dict(session.settings)
    with pytest.raises(ChatError):
        follow(session, f"/set {typed}")
    assert session.settings == before


@given(st.text())
def test_any_command_line_is_followed_or_refused(line):
    session = Session("m", system=None, settings={})
    if line.startswith(("save", "load")):
        return
    try:
        follow(session, f"/{line}")
    except ChatError as error:
        assert error.message  # noqa: PT017  either end is right, an empty sentence is not


def test_every_command_is_in_the_help(session):
    text = follow(session, "/help").note
    assert all(name in text for name in COMMANDS)


BLOCKS = [
    "# Title\n\n",
    "A paragraph\nof lines.\n\n",
    "```py\nx = 1\n\n\ny = 2\n```\n\n",
    "- one\n\n- two\n\n",
    "End\n\n",
]


def test_complete_blocks_are_cut_off_and_code_is_kept_whole():
    text = "".join(BLOCKS)
    assert split_complete(text[: text.index("y = 2")]) == text.index("```py")
    assert split_complete("one\n\n") == 0  # a list could go on
    assert split_complete("1. one\n\n2. two\n") == 0
    assert split_complete("one\n\nA second paragraph") == 5
    assert split_complete("~~~\na\n\n```\n\nb is long enough\n") == 0


@given(st.lists(st.sampled_from(BLOCKS), max_size=8), st.data())
def test_however_text_arrives_each_block_is_cut_at_the_same_places(blocks, data):
    text, rest, cuts = "".join(blocks), "", []
    while text:
        size = data.draw(st.integers(1, len(text)))
        rest, text = rest + text[:size], text[size:]
        if end := split_complete(rest):
            cuts.append(rest[:end])
            rest = rest[end:]
    assert "".join(cuts) + rest == "".join(blocks)
    assert all(cut.count("```") % 2 == 0 for cut in cuts)


def test_only_tabs_and_newlines_are_left_of_controls():
    assert printable("a\x1b[2J\x07\r\x9b\tb\n\u2028") == "a[2J\tb\n\u2028"


@given(st.lists(st.integers(1, 7)))
def test_data_lines_come_whole_however_the_bytes_arrive(sizes):
    body = ': ping\r\n\ndata: {"a": "\u2028\x85"}\r\n\nevent: x\ndata:[DONE]\n\n'.encode()
    parts, begin = [], 0
    for size in sizes:
        parts.append(body[begin : begin + size])
        begin += size
    parts.append(body[begin:])
    assert list(data_lines(iter(parts))) == ['{"a": "\u2028\x85"}'.encode(), b"[DONE]"]


def test_another_model_of_the_server_is_chosen_and_the_messages_stay(session):
    session.served = lambda: ["m", "sql"]
    assert follow(session, "/model").note == "* m\n  sql"
    assert "sql answers from now on" in follow(session, "/model sql").note
    assert session.body("c")["model"] == "sql"
    assert len(session.messages) == 2
    with pytest.raises(ChatError, match="The server has m, sql, not 'big'"):
        follow(session, "/model big")
    assert session.model == "sql"
