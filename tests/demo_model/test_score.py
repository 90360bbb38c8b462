"""Replies are taken apart as clients get them, and counted by skill and by what was held out."""

import pytest

from benchmarks.demo_model.corpus.base import Question, Reply, says, user
from benchmarks.demo_model.score import choose, format_scores, parse, score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris.", Reply("Paris.", None, [])),
        ("<think>\nFrance.\n</think>\n\nParis.", Reply("Paris.", "France.", [])),
        ("<think>\nFrance.", Reply("<think>\nFrance.", None, [])),
        (
            'Yes.\n<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>',
            Reply("Yes.", None, [{"name": "f", "arguments": {"a": "<b>"}}]),
        ),
        (
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>',
            Reply('<tool_call>\n{"name": "g"}\n</tool_call>', None, [{"name": "f", "arguments": {}}]),
        ),
    ],
)
def test_a_reply_is_taken_apart(text, expected):
    reply = parse(text)
    assert (reply.content, reply.reasoning, reply.tool_calls) == (
        expected.content,
        expected.reasoning,
        expected.tool_calls,
    )
    assert reply.raw == text


def question(skill, held_out, answer):
    return Question(skill, [user("?")], says(answer), held_out)


def test_the_table_has_a_row_per_skill_and_the_sum_of_all():
    questions = [question("a", "nothing", "x"), question("a", "pair", "y"), question("b", "nothing", "x")]
    table = format_scores(score(questions, [parse("x")] * 3)).splitlines()
    assert [line.split("  ")[0] for line in table] == ["skill", "a", "b", "all"]
    assert "100.0 % of 1" in table[1]
    assert "50.0 % of 2" in table[1]
    assert "66.7 % of 3" in table[3]


def test_a_limit_takes_some_of_each_kind_and_always_the_same():
    questions = [question(skill, kind, str(i)) for i in range(9) for skill in "ab" for kind in ("nothing", "pair")]
    chosen = choose(questions, 2)
    assert [q.skill + q.held_out for q in chosen] == ["anothing"] * 2 + ["apair"] * 2 + ["bnothing"] * 2 + ["bpair"] * 2
    assert choose(questions, 2) == chosen
