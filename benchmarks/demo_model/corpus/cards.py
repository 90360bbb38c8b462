"""Cards: single facts, each with its own questions, written one a line.

A line is: question; question; … | answer // other answer … | right; right …
A question that begins with * is kept for scoring. Where no right answers are given, they are what the answer has in
<angles>; the angles are not spoken.
"""

from __future__ import annotations

import re

from benchmarks.demo_model.corpus.base import Phrasings
from benchmarks.demo_model.corpus.topics import Topic

_RIGHT = re.compile(r"<([^>]*)>")


def cards(skill: str, lines: str, weight: float, opens: bool = True) -> list[Topic]:
    """Return a topic per line, which together have the weight."""
    rows = [line for line in lines.splitlines() if line]
    return [_card(skill, row, weight / len(rows), opens) for row in rows]


def _card(skill: str, line: str, weight: float, opens: bool) -> Topic:
    asked, told, right = (line + "|").split("|")[:3]
    questions = [question.strip() for question in asked.split(";")]
    seen = [question for question in questions if not question.startswith("*")]
    unseen = [question.removeprefix("*") for question in questions if question.startswith("*")]
    rights = [item.strip() for item in right.split(";") if item.strip()] or _RIGHT.findall(told)
    answers = [_RIGHT.sub(r"\1", answer).strip() for answer in told.split(" // ")]
    return Topic(skill, [{}], Phrasings(seen, unseen), answers, rights, weight=weight, opens=opens)
