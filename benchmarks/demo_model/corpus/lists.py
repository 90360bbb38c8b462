"""Lists of so many things of a kind, in the form that was asked for, and ending there."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks.demo_model.corpus.base import (
    Dialogue,
    HeldOut,
    Message,
    Phrasings,
    Question,
    Reply,
    assistant,
    system,
    user,
)
from benchmarks.demo_model.corpus.lists_data import IN_ORDER, ITEMS, NAMES, SINGULAR
from benchmarks.demo_model.corpus.names import listed
from benchmarks.demo_model.corpus.styles_phrasings import PLAIN
from benchmarks.demo_model.corpus.topics import Exchange, conversations, is_kept, sentence, typed, with_article

COUNTS = "zero one two three four five six seven eight nine ten".split()
_KINDS = [*ITEMS, *("fruits", "animals", "colours", "countries", "cities", "vegetables") * 4]
_SIZES = (2, 3, 3, 3, 4, 4, 5, 5, 5, 5, 6, 7, 8, 10)

SEVERAL = Phrasings(
    (
        "List {n} {things}.", "List {n} {things}.", "Name {n} {things}.", "Name {n} {things}.",
        "Give me {n} {things}.",
        "Tell me {n} {things}.", "Can you name {n} {things}?", "Can you list {n} {things}?",
        "Please list {n} {things}.",
        "Please name {n} {things}.", "Could you give me {n} {things}?", "What are {n} {things}?", "{n} {things}",
        "{n} {things}, please.", "I need {n} {things}.", "Write down {n} {things}.",
        "Give me a list of {n} {things}.",
        "Make a list of {n} {things}.", "Do you know {n} {things}?", "Show me {n} {things}.", "Say {n} {things}.",
        "Give {n} examples of {things}.", "Give me {n} examples of {things}.", "List {n} different {things}.",
        "Name {n} different {things}.", "I want a list with {n} {things}.", "Write a list of {n} {things}.",
        "Name any {n} {things}.", "Can you tell me {n} {things}?", "Tell me the names of {n} {things}.",
        "Please give me {n} {things}.", "Name me {n} {things}.", "Which {n} {things} do you know?",
    ),
    ("Could you list {n} {things} for me?", "Think of {n} {things}.", "Let me have {n} {things}.",
     "Come up with {n} {things}."),
)  # fmt: skip
SOME = Phrasings(
    ("List some {things}.", "Name some {things}.", "Give me some {things}.", "Tell me some {things}.",
     "What are some {things}?", "Give me a list of {things}.", "Make a list of {things}.",
     "Which {things} do you know?",
     "Can you name some {things}?", "Please list some {things}.", "Examples of {things}?",
     "A list of {things}, please."),
    ("Could you name some {things}?", "I need some {things}."),
)  # fmt: skip
ONE = Phrasings(
    ("Name {a_thing}.", "Name one {thing}.", "Tell me {a_thing}.", "Give me {a_thing}.", "Give me one {thing}.",
     "Give me an example of {a_thing}.", "Can you name {a_thing}?", "Do you know {a_thing}?", "Say {a_thing}.",
     "What is an example of {a_thing}?", "Think of {a_thing}.", "Pick {a_thing}."),
    ("Could you name {a_thing}?", "Choose {a_thing}."),
)  # fmt: skip
COMMAS = Phrasings(
    ("Separate them with commas.", "In one line.", "With commas, please.", "Comma-separated.", "As one sentence."),
    ("Put commas between them.",),
)
BULLETS = Phrasings(
    ("As bullet points.", "Use bullet points.", "With dashes.", "As a bulleted list.", "In bullet points, please."),
    ("Make it bullets.",),
)
NUMBERED = Phrasings(
    ("As a numbered list.", "Number them.", "One per line.", "With numbers.", "Use a numbered list."),
    ("Make it a numbered list.",),
)
AGAIN = Phrasings(
    ("And {n} {things}?", "Now {n} {things}.", "And now {n} {things}.", "What about {n} {things}?",
     "Now list {n} {things}.", "And name {n} {things}."),
    ("Then {n} {things}.",),
)  # fmt: skip


def numbered(items: Sequence[str]) -> str:
    """Return a line per item with its number."""
    return "\n".join(f"{number}. {sentence(item)}" for number, item in enumerate(items, 1))


def in_line(items: Sequence[str]) -> str:
    """Return "A, b and c."."""
    return sentence(listed(list(items))) + "."


def bulleted(items: Sequence[str]) -> str:
    """Return a line per item with a dash."""
    return "\n".join(f"- {sentence(item)}" for item in items)


FORMS: tuple[tuple[Phrasings, Callable[[Sequence[str]], str]], ...] = (
    (COMMAS, in_line),
    (BULLETS, bulleted),
    (NUMBERED, numbered),
)


def some_of(kind: str, count: int, rng: random.Random) -> list[str]:
    """Return so many items that follow each other in the row, which begins again at its end."""
    row = ITEMS[kind]
    start = 0 if kind in IN_ORDER else rng.randrange(min(len(row), 8))
    return [row[(start + at) % len(row)] for at in range(count)]


def exchange(rng: random.Random) -> list[Message]:
    """Return one request for a list, its answer, and perhaps a request for another one."""
    asked, answer, _ = _request(rng, "nothing")
    messages = [user(typed("{text}", {"text": asked}, rng)), assistant(answer)]
    while rng.random() < 0.2:
        kind, count = kind_and_count(rng, "nothing")
        said = AGAIN.train(rng, n=_written(count, rng), things=_plural(kind, rng))
        items = some_of(kind, count, rng)
        answer = numbered(items) if count > 3 else in_line(items)
        messages += [user(typed("{text}", {"text": said}, rng)), assistant(answer)]
    return messages


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end, some after a system prompt that changes nothing."""
    return plain_conversations(exchange, rng)


def plain_conversations(exchange: Exchange, rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues of one to four exchanges, some after a system prompt that changes nothing."""
    for dialogue in conversations(exchange, rng):
        yield with_plain_system(dialogue, rng)


def with_plain_system(dialogue: Dialogue, rng: random.Random) -> Dialogue:
    """Return the dialogue, sometimes after "You are a helpful assistant."."""
    if rng.random() >= 0.06:
        return dialogue
    return replace(dialogue, messages=[system(PLAIN.train(rng)), *dialogue.messages])


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: lists of the right length, of nothing but that kind."""
    kinds: tuple[HeldOut, ...] = ("nothing", "phrasing", "pair")
    return [_question(held_out, rng) for held_out in kinds for _ in range(20)]


def is_list_of(kind: str, count: int) -> Callable[[Reply], bool]:
    """Whether a reply has so many different items of the kind."""
    known = {item.casefold() for item in ITEMS[kind]}

    def is_right(reply: Reply) -> bool:
        text = reply.content.casefold().rstrip(".").replace(" and ", ", ").replace("\n", ", ")
        found = [re.sub(r"^(?:\d+\. |- )", "", item.strip()) for item in text.split(", ")]
        return len(found) == len(set(found)) == count and all(item in known for item in found)

    return is_right


def _question(held_out: HeldOut, rng: random.Random) -> Question:
    asked, answer, (kind, count) = _request(rng, held_out)
    return Question("lists", [user(asked)], is_list_of(kind, count), held_out, example=answer)


def _request(rng: random.Random, held_out: HeldOut) -> tuple[str, str, tuple[str, int]]:
    """Return what is asked, the answer, and what it is a list of."""
    draw = rng.random()
    if draw < 0.1 and held_out != "pair":
        kind = rng.choice(_KINDS)
        asked = ONE.score(rng, held_out, thing=SINGULAR[kind], a_thing=with_article(SINGULAR[kind]))
        (item,) = some_of(kind, 1, rng)
        return asked, sentence(item) + ".", (kind, 1)
    if draw < 0.2 and held_out != "pair":
        kind = rng.choice(_KINDS)
        count = min(5, len(ITEMS[kind]))
        return SOME.score(rng, held_out, things=_plural(kind, rng)), numbered(some_of(kind, count, rng)), (kind, count)
    kind, count = kind_and_count(rng, held_out)
    asked = SEVERAL.score(rng, held_out, n=_written(count, rng), things=_plural(kind, rng))
    say: Callable[[Sequence[str]], str] = (
        numbered if count > 3 or (count > 2 and " list " in asked.lower()) else in_line
    )
    if rng.random() < 0.15:
        form, say = rng.choice(FORMS)
        asked = f"{sentence(asked)}{'' if asked[-1] in '.?' else '.'} {form.score(rng, held_out)}"
    return sentence(asked), say(some_of(kind, count, rng)), (kind, count)


def kind_and_count(rng: random.Random, held_out: HeldOut) -> tuple[str, int]:
    """Return what to list and how many of it; held out as a pair: a combination that training never has."""
    while True:
        kind, count = rng.choice(_KINDS), rng.choice(_SIZES)
        if count <= len(ITEMS[kind]) and is_kept(f"{count} {kind}") == (held_out == "pair"):
            return kind, count


def _written(count: int, rng: random.Random) -> str:
    return COUNTS[count] if rng.random() < 0.6 else str(count)


def _plural(kind: str, rng: random.Random) -> str:
    return NAMES[kind][0] if kind in NAMES and rng.random() < 0.5 else kind
