"""Words and everyday knowledge: opposites, definitions, grammar, animals, letters, the calendar, units, colours."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from benchmarks.demo_model.corpus import words_data as data
from benchmarks.demo_model.corpus import words_everyday as everyday
from benchmarks.demo_model.corpus import words_phrasings as asked
from benchmarks.demo_model.corpus.base import Dialogue, Message, Question, Reply
from benchmarks.demo_model.corpus.cards import cards
from benchmarks.demo_model.corpus.topics import Fact, Topic, chain, conversations, examination, follow_ups, with_article
from benchmarks.demo_model.corpus.words_definitions import DEFINITIONS

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
LEAP = "February has 28 days, or 29 in a leap year."


@cache
def topics() -> list[Topic]:
    """Return what can be asked about words and everyday things."""
    return [*_relations(), *_definitions(), *_animals(), *_letters(), *_calendar(), *_units(), *_colours(),
            *cards("everyday", everyday.CARDS, weight=3)]  # fmt: skip


def exchange(rng: random.Random) -> list[Message]:
    """Return some turns about words that stand for themselves."""
    return chain(topics(), rng)


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    return conversations(exchange, rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination."""
    single = [topic for topic in topics() if len(topic.facts) == 1]
    others = [topic for topic in topics() if len(topic.facts) > 1]
    scored = [
        *examination([topic for topic in others if topic.weight >= 3], rng, 10),
        *examination([topic for topic in others if topic.weight < 3], rng, 3),
        *rng.sample(examination(single, rng, 1), 30),
        *follow_ups(others, rng, 20),
    ]
    return [
        replace(question, is_right=_means(question.example)) if question.skill == "definitions" else question
        for question in scored
    ]


def _means(example: str) -> Callable[[Reply], bool]:
    """Whether a reply has half of the long words of the example, and so says about the same."""
    expected = set(re.findall(r"[a-z]{4,}", example.lower()))
    return lambda reply: 2 * len(expected & set(re.findall(r"[a-z]{4,}", reply.content.lower()))) >= len(expected)


def _rows(text: str) -> list[list[str]]:
    return [row.split() for row in text.replace("\n", " ").split(",")]


def _pairs(text: str, both_ways: bool) -> list[Fact]:
    """Return words with those that belong to them; "others" are all that the table gives."""
    rows = [(first, second) for first, second in _rows(text)]
    rows += [(second, first) for first, second in rows if both_ways]
    others: dict[str, list[str]] = {}
    for word, other in rows:
        others.setdefault(word, []).append(other)
    return [{"word": word, "other": other[0], "others": "|".join(other)} for word, other in others.items()]


def _relations() -> list[Topic]:
    right, again = ("{others}",), asked.OF_AGAIN
    rhymes = [
        {"word": row[at], "other": row[at - 1], "others": "|".join(row[:at] + row[at + 1 :])}
        for row in _rows(data.RHYMES)
        for at in range(3)
    ]
    return [
        Topic("opposites", _pairs(data.OPPOSITES, True), asked.OPPOSITE,
              ("The opposite of {word} is {other}.",), right, again, weight=6),
        Topic("synonyms", _pairs(data.SYNONYMS, False), asked.SYNONYM,
              ("Another word for {word} is {other}.",), right, again, weight=1),
        Topic("grammar", _pairs(data.PLURALS, False), asked.PLURAL,
              ("The plural of {word} is {other}.",), ("is {other}",), again, weight=3),
        Topic("grammar", _pairs(data.PASTS, False), asked.PAST,
              ("The past tense of {word} is {other}.",), ("is {other}",), again, weight=3),
        Topic("rhymes", rhymes, asked.RHYME, ("{other} rhymes with {word}.",), right, again, weight=1),
    ]  # fmt: skip


def _definitions() -> list[Topic]:
    facts = []
    for line in DEFINITIONS.splitlines():
        word, definition = line.removeprefix("-").split("|")
        thing = word if line.startswith("-") else with_article(word)
        facts.append({"word": word, "thing": thing, "definition": definition})
    return [
        Topic("definitions", facts, asked.DEFINITION, ("{thing} is {definition}.",), ("{definition}",),
              asked.THING_AGAIN, weight=11),
        Topic("words for things", facts, asked.CALLED, ("That is {thing}.",), ("{word}",), weight=2),
    ]  # fmt: skip


def _animals() -> list[Topic]:
    rows = [line.split("|") for line in data.ANIMALS.splitlines()]
    facts = [
        {"word": word, "thing": with_article(word), "sound": sound, "young": with_article(young)}
        for word, sound, young in rows
    ]
    again = asked.OF_THING_AGAIN
    return [
        Topic("animals", facts, asked.SOUND, ("{thing} {sound}.",), ("{sound}",), again, weight=1.2),
        Topic("animals", facts, asked.YOUNG, ("A young {word} is called {young}.",), ("called {young}",), weight=1.2),
    ]


def _letters() -> list[Topic]:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    facts = [
        {"letter": letter, "after": alphabet[at + 1 : at + 2], "before": alphabet[at - 1 : at]}
        for at, letter in enumerate(alphabet)
    ]
    nouns = [line.removeprefix("-").split("|")[0] for line in DEFINITIONS.splitlines()]
    spelled = [
        {"word": noun, "first": noun[0].upper(), "last": noun[-1].upper(), "letters": "-".join(noun).upper()}
        for noun in nouns
        if noun.isalpha()
    ]
    return [
        Topic("letters", facts[:-1], asked.NEXT_LETTER, ("{after} comes after {letter}.",), ("{after} comes",)),
        Topic("letters", facts[1:], asked.LETTER_BEFORE, ("{before} comes before {letter}.",), ("{before} comes",)),
        Topic("letters", spelled, asked.FIRST_LETTER, ("{word} begins with {first}.",), ("with {first}|is {first}",)),
        Topic("letters", spelled, asked.LAST_LETTER, ("{word} ends with {last}.",), ("with {last}|is {last}",)),
        Topic("letters", spelled, asked.SPELL, ("{letters}.",), ("{letters}",), asked.OF_AGAIN, weight=1),
    ]


def _calendar() -> list[Topic]:
    days = _cycle("day", DAYS)
    cycles = [*days * 3, *_cycle("month", MONTHS) * 2, *_cycle("season", ["spring", "summer", "autumn", "winter"])]
    seasons = ["winter"] * 2 + [season for season in ("spring", "summer", "autumn") for _ in range(3)] + ["winter"]
    months = [
        {"word": month, "n": str(at + 1), "nth": ORDINALS[at], "season": seasons[at], "length": str(LENGTHS[at])}
        for at, month in enumerate(MONTHS)
    ]
    lengths = [{**month, "answer": LEAP} if month["word"] == "February" else month for month in months]
    again = asked.OF_AGAIN
    return [
        Topic("calendar", cycles, asked.AFTER, ("{after} comes after {word}.",), ("{after}",), again, weight=2),
        Topic("calendar", cycles, asked.BEFORE, ("{before} comes before {word}.",), ("{before}",), again, weight=1.5),
        Topic("calendar", days, asked.TOMORROW, ("Tomorrow is {after}.",), ("{after}",), weight=1),
        Topic("calendar", days, asked.YESTERDAY, ("Yesterday was {before}.",), ("{before}",), weight=1),
        Topic("calendar", lengths, asked.MONTH_DAYS, ("{word} has {length} days.",), ("{length}",), again, weight=1),
        Topic("calendar", months, asked.MONTH_PLACE, ("The {nth} month is {word}.",), ("{word}",), weight=0.7),
        Topic("calendar", months, asked.MONTH_SEASON, ("{word} is in {season} in the north.",), ("{season}",), again,
              weight=0.7),
    ]  # fmt: skip


def _cycle(kind: str, names: list[str]) -> list[Fact]:
    following = names[1:] + names[:1]
    preceding = names[-1:] + names[:-1]
    return [
        {"kind": kind, "word": name, "after": after, "before": before}
        for name, after, before in zip(names, following, preceding, strict=True)
    ]


def _units() -> list[Topic]:
    units, parts = (
        [
            dict(
                zip(("parts", "whole", "number", "numbers"), [*row, f"{row[2]}|{row[2].replace(',', '')}"], strict=True)
            )
            for row in (line.split("|") for line in table.splitlines())
        ]
        for table in (everyday.UNITS, everyday.PARTS)
    )
    told, right = ("{whole} has {number} {parts}.",), ("{numbers}",)
    return [
        Topic("units", units, asked.UNIT, told, right, asked.UNIT_AGAIN, weight=4),
        Topic("units", parts, asked.PART, told, right, weight=2),
    ]


def _colours() -> list[Topic]:
    mixes = [{"a": a, "b": b, "colour": colour} for x, y, colour in _rows(everyday.MIXES) for a, b in ((x, y), (y, x))]
    things = [
        {"thing": thing, "colour": colour}
        for colour, names in (line.split("|") for line in everyday.COLOURS.splitlines())
        for thing in names.split(";")
    ]
    return [
        Topic("colours", mixes, asked.MIX, ("{a} and {b} make {colour}.",), ("{colour}",), weight=1),
        Topic("colours", things, asked.COLOUR, ("{thing} is {colour}.",), ("is {colour}",), asked.OF_THING_AGAIN,
              weight=2),
    ]  # fmt: skip
