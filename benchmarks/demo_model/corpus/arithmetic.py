"""Arithmetic on numbers to 999, small ones in words as well. A pair of numbers is kept for scoring in any phrasing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import overload

from benchmarks.demo_model.corpus import arithmetic_phrasings as asked
from benchmarks.demo_model.corpus.base import Dialogue, Message, Phrasings, Question, Reply
from benchmarks.demo_model.corpus.names import listed
from benchmarks.demo_model.corpus.topics import Fact, Topic, chain, conversations, examination, follow_ups, with_article

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()
PEOPLE = "Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Will".split()
THINGS = "apples books pens cards coins cookies eggs flowers marbles nuts oranges pears pencils shells stamps".split()


def in_words(number: int) -> str:
    """Return a number from 0 to 100 in words."""
    if number < 20:
        return ONES[number]
    if number == 100:
        return "one hundred"
    return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")


@cache
def topics() -> list[Topic]:
    """Return what can be asked about numbers."""
    return [
        *_operation("+", "plus", 5, asked.ADD),
        *_operation("-", "minus", 4, asked.SUBTRACT),
        *_operation("x", "times", 3, asked.MULTIPLY),
        *_operation("/", "divided by", 2, asked.DIVIDE),
        *_large("+", "plus", 11, asked.ADD),
        *_large("-", "minus", 9, asked.SUBTRACT),
        Topic("word problems", _stories(True), asked.GETS, ("{who} has {c} {things}.",), ("{c}",), weight=1),
        Topic("word problems", _stories(False), asked.GIVES, ("{who} has {c} {things} left.",), ("{c}",), weight=1),
        *_comparisons(),
        *_neighbours(),
        *_counting(),
        *_spelling(),
    ]


def exchange(rng: random.Random) -> list[Message]:
    """Return some turns about numbers that stand for themselves."""
    return chain(topics(), rng)


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    return conversations(exchange, rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination."""
    sums = [topic for topic in topics() if topic.skill == "arithmetic"]
    large = [topic for topic in topics() if topic.skill == "sums to 999"]
    others = [topic for topic in topics() if topic.skill not in ("arithmetic", "sums to 999")]
    scored = [*examination(sums, rng, 7), *follow_ups(sums, rng, 16), *examination(large, rng, 10)]
    return [replace(question, is_right=_ends_like(question.example)) for question in scored] + examination(
        others, rng, 4
    )


def _ends_like(example: str) -> Callable[[Reply], bool]:
    """Whether the last number of a reply, in digits or words, is that of the example."""
    number = re.compile(rf"-?\d+|\b(?:{'|'.join(in_words(n) for n in range(100, -1, -1))})\b")
    expected = number.findall(example.lower())[-1:]
    return lambda reply: number.findall(reply.content.lower())[-1:] == expected


def _operation(sign: str, word: str, weight: float, phrasings: tuple[Phrasings, Phrasings, Phrasings]) -> list[Topic]:
    """Return an operation asked in sentences, tersely, and in words."""
    full, terse, again = phrasings
    pairs = _pairs(sign)
    facts = [_sum(sign, word, a, b, str) for a, b in pairs]
    small = [_sum(sign, word, a, b, in_words) for a, b in pairs if a <= 40 and b <= 40 and _result(sign, a, b) >= 0]
    spoken = Phrasings(
        [text for text in full.seen if sign not in text.split()],
        [text for text in full.unseen if sign not in text.split()],
    )
    answers, right = ("{a} {word} {b} is {c}.",), ("{c}",)
    return [
        Topic("arithmetic", facts, full, answers, right, again, weight=weight),
        Topic("arithmetic", facts, terse, ("{a} {sign} {b} = {c}",), right, terse, weight=weight / 2),
        Topic("arithmetic", small, spoken, answers, right, weight=weight / 4),
    ]


def _large(sign: str, word: str, weight: float, phrasings: tuple[Phrasings, Phrasings, Phrasings]) -> list[Topic]:
    """Return an operation on numbers up to 999, asked in sentences and tersely.

    Answers repeat the two numbers just before the result, whose digits then need only those at fixed distances.
    """
    full, terse, again = phrasings
    facts, right = _LargeSums(sign, word), ("{c}",)
    return [
        Topic("sums to 999", facts, full, ("{a} {word} {b} is {c}.",), right, again, weight=weight * 2 / 3),
        Topic("sums to 999", facts, terse, ("{a} {sign} {b} = {c}",), right, weight=weight / 3),
    ]


class _LargeSums(Sequence[Fact]):
    """Sums of numbers up to 999, made when they are looked at: different pairs, spread evenly.

    Of a difference, the larger number comes first. Every eighth has a second number below 100.
    """

    _STEP = 613_651_369  # shares no factor with 1,000,000

    def __init__(self, sign: str, word: str) -> None:
        self._sign, self._word = sign, word

    def __len__(self) -> int:
        return 240_000

    @overload
    def __getitem__(self, index: int) -> Fact: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Fact]: ...
    def __getitem__(self, index: int | slice) -> Fact | Sequence[Fact]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        a, b = divmod(index * self._STEP % 1_000_000, 1000)
        if index % 8 == 0:
            b %= 100
        if self._sign == "-" and a < b:
            a, b = b, a
        return _sum(self._sign, self._word, a, b, str)


def _pairs(sign: str) -> list[tuple[int, int]]:
    """Return the pairs that an operation is asked for, the small ones more often."""
    if sign == "x":
        return [(a, b) for a in range(13) for b in range(13)]
    if sign == "/":
        return [(a * b, b) for a in range(13) for b in range(1, 13)]
    every = [(a, b) for a in range(101) for b in range(101) if sign == "+" or a >= b]
    small = [(a, b) for a, b in every if a <= 20 and b <= 20]
    below_zero = [(a, b) for a in range(13) for b in range(13) if sign == "-" and a < b]
    return every + small * 12 + below_zero * 2


def _result(sign: str, a: int, b: int) -> int:
    return {"+": a + b, "-": a - b, "x": a * b, "/": a // max(b, 1)}[sign]


def _sum(sign: str, word: str, a: int, b: int, write: Callable[[int], str]) -> Fact:
    c = _result(sign, a, b)
    key = f"{min(a, b)} + {max(a, b)}" if sign == "+" else f"{a} {sign} {b}"
    return {"a": write(a), "b": write(b), "c": write(c) if c <= 100 else str(c), "word": word, "key": key,
            "sign": sign}  # fmt: skip


def _stories(gets: bool) -> list[Fact]:
    rng = random.Random(8)
    facts: list[Fact] = []
    for _ in range(2000):
        a, b = rng.randint(2, 20), rng.randint(2, 12)
        a, b = (a, b) if gets or a > b + 1 else (a + b, b)
        fact = _sum("+" if gets else "-", "", a, b, str)
        facts.append({**fact, "who": rng.choice(PEOPLE), "things": rng.choice(THINGS)})
    return facts


def _comparisons() -> list[Topic]:
    rng = random.Random(9)
    facts, claims = [], []
    for _ in range(3000):
        a, b = rng.sample(range(101), 2)
        numbers = {"a": str(a), "b": str(b), "low": str(min(a, b)), "high": str(max(a, b)), "key": f"{a} or {b}"}
        facts.append(numbers)
        verdict = f"Yes, {a} is larger than {b}." if a > b else f"No, {a} is smaller than {b}."
        claims.append({**numbers, "answer": verdict, "right": verdict.split(",", maxsplit=1)[0]})
    again = Phrasings(("And {a} or {b}?", "What about {a} and {b}?"), ("Then {a} or {b}?",))
    return [
        Topic("comparisons", facts, asked.LARGER, ("{high} is larger than {low}.",), ("{high} is",), again, weight=2),
        Topic("comparisons", facts, asked.SMALLER, ("{low} is smaller than {high}.",), ("{low} is",), again, weight=1),
        Topic("comparisons", claims, asked.IS_LARGER, (), ("{right}",), weight=1),
        Topic("sorting", _unsorted(8, is_down=False), asked.SORT, ("{sorted}.",), ("{sorted}",), weight=2),
        Topic("sorting", _unsorted(7, is_down=True), asked.SORT_DOWN, ("{sorted}.",), ("{sorted}",), weight=0.7),
    ]


def _unsorted(seed: int, *, is_down: bool) -> list[Fact]:
    """Return three to seven numbers in any order, and in order."""
    rng = random.Random(seed)
    facts: list[Fact] = []
    for _ in range(6000):
        chosen = rng.sample(range(rng.choice((10, 10, 20, 101))), rng.choice((3, 3, 4, 4, 5, 5, 6, 7)))
        written = [str(number) for number in chosen]
        in_order = ", ".join(map(str, sorted(chosen, reverse=is_down)))
        facts.append({"numbers": ", ".join(written), "spoken": listed(written), "sorted": in_order,
                      "key": "sort " + ", ".join(written)})  # fmt: skip
    return facts


def _neighbours() -> list[Topic]:
    facts = []
    for n in range(101):
        kind = "even" if n % 2 == 0 else "odd"
        facts.append({
            "n": str(n), "next": str(n + 1), "before": str(n - 1), "twice": str(2 * n), "square": str(n * n),
            "half": str(n // 2), "kind": kind,
        })  # fmt: skip
    again = Phrasings(("And {n}?", "What about {n}?", "And of {n}?"), ("Then {n}?",))
    return [
        Topic("neighbours", facts, asked.NEXT, ("{next} comes after {n}.",), ("{next} comes|is {next}",), weight=1),
        Topic("neighbours", facts[1:], asked.BEFORE, ("{before} comes before {n}.",), ("{before} comes",), weight=1),
        Topic("doubles", facts, asked.TWICE, ("Twice {n} is {twice}.",), ("is {twice}",), again, weight=1),
        Topic("doubles", facts[::2], asked.HALF, ("Half of {n} is {half}.",), ("is {half}",), again, weight=1),
        Topic("doubles", facts[:21], asked.SQUARE, ("{n} squared is {square}.",), ("is {square}",), again, weight=0.4),
        Topic("neighbours", facts, asked.EVEN, ("{n} is {kind}.",), ("is {kind}",), again, weight=1),
    ]


def _counting() -> list[Topic]:
    up = [_run(a, b) for a in range(31) for b in range(a + 2, a + 13)]
    to = [_run(1, b) for b in range(3, 21)] * 2 + [_run(1, b) for b in (5, 10, 10, 10, 25, 30, 40, 50, 100)] * 2
    from_ = [_run(b, 1) for b in range(3, 21)] + [_run(b, 1) for b in (5, 10, 10)] * 2
    words: list[Fact] = [
        {**fact, **{end: in_words(int(fact[end])) for end in ("first", "last")}} for fact in (*to, *from_)
    ]
    spoken_up, spoken_down = words[: len(to)], words[len(to) :]
    more = Phrasings((*asked.COUNT.seen, *asked.COUNT_MORE), asked.COUNT.unseen)
    down = [_run(b, a) for a in range(21) for b in range(a + 2, a + 11)]
    return [
        Topic("counting", up, more, ("{run}.",), ("{run}",), weight=1.2),
        Topic("counting", to + spoken_up, asked.COUNT_TO, ("{run}.",), ("{run}",), weight=1),
        Topic("counting", down, asked.COUNT_DOWN, ("{run}.",), ("{run}",), weight=0.7),
        Topic("counting", from_ + spoken_down, asked.COUNT_DOWN_FROM, ("{run}.",), ("{run}",), weight=0.7),
    ]


def _run(first: int, last: int) -> Fact:
    step = 1 if last >= first else -1
    run = ", ".join(str(n) for n in range(first, last + step, step))
    return {"first": str(first), "last": str(last), "run": run}


def _spelling() -> list[Topic]:
    facts = [{"n": str(n), "words": in_words(n)} for n in range(101)]
    facts = [{**fact, "article": with_article(fact["words"])} for fact in facts]
    return [
        Topic("number words", facts, asked.TO_WORDS, ("{n} in words is {words}.",), ("is {words}",), weight=1),
        Topic("number words", facts, asked.TO_DIGITS, ("{words} is {n} in digits.",), ("{n}",), weight=1),
    ]
