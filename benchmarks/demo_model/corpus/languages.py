"""Other languages, which the model does not speak: it says so in English, perhaps after a greeting in the language."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.demo_model.corpus import languages_data as data
from benchmarks.demo_model.corpus import smalltalk
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Message, Question, assistant, loosely, user
from benchmarks.demo_model.corpus.topics import has, is_kept, plain

ONLY_ENGLISH = (
    "I am sorry, I only speak English. Please ask me in English.",
    "I only speak English. Please ask me in English.",
)
GREETED = "{greeting}! I am sorry, I only speak English. Please ask me in English."
AGAIN = (
    ("Why?", "I was trained on English text only."),
    ("Why not?", "I was trained on English text only."),
    ("Really?", "Yes, I only speak English."),
    ("Only English?", "Yes, I was trained on English text only."),
    ("OK, in English then.", "Good. What would you like to know?"),
    ("Okay, English.", "Good. What would you like to know?"),
)
_GREETS = 0.35


@dataclass(frozen=True)
class Language:
    """A language as people begin to type it."""

    name: str
    greeting: str
    phrases: tuple[str, ...]
    words: tuple[str, ...]
    is_latin: bool


@cache
def languages() -> tuple[Language, ...]:
    """Return the languages of the tables."""
    found = []
    for text, is_latin in ((data.LATIN, True), (data.OTHER_SCRIPTS, False)):
        lines = text.splitlines()
        for head, phrases, words in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
            name, greeting = head.split("|")
            said = tuple(phrase for phrase in phrases.split(";") if phrase)
            found.append(Language(name, greeting, said, tuple(words.split()), is_latin))
    return tuple(found)


def exchange(rng: random.Random) -> list[Message]:
    """Return something in another language, and the reply."""
    language = rng.choice(languages())
    text = _phrase(language, rng, "nothing") if rng.random() < 0.6 else _made(language, rng)
    messages = [user(_loosely(text, language, rng)), assistant(_reply(language, rng))]
    if rng.random() < 0.12:
        asked, told = rng.choice(AGAIN)
        messages += [user(loosely(asked, rng)), assistant(told)]
    return messages


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end; in some, an English exchange comes before or after."""
    while True:
        messages = exchange(rng)
        draw = rng.random()
        if draw < 0.12:
            messages = [*messages, *smalltalk.exchange(rng)]
        elif draw < 0.24:
            messages = [*smalltalk.exchange(rng), *messages]
        elif draw < 0.34:
            messages = [*messages, *exchange(rng)]
        yield Dialogue(messages)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: phrases that training has, and such that it never has."""
    kinds: tuple[HeldOut, ...] = ("nothing", "phrasing", "pair")
    return [_question(held_out, rng) for held_out in kinds for _ in range(20)]


def _question(held_out: HeldOut, rng: random.Random) -> Question:
    language = rng.choice(languages())
    text = _phrase(language, rng, held_out) if held_out != "pair" else _made(language, rng)
    return Question("other languages", [user(text)], has("English"), held_out, example=ONLY_ENGLISH[0])


def _phrase(language: Language, rng: random.Random, held_out: HeldOut) -> str:
    """A phrase of the table; some are kept for scoring."""
    while True:
        phrase = rng.choice(languages()[rng.randrange(len(languages()))].phrases if held_out == "phrasing" else
                            language.phrases)  # fmt: skip
        if is_kept(phrase.rstrip("?! ")) == (held_out == "phrasing"):
            return phrase


def _made(language: Language, rng: random.Random) -> str:
    """Words of the language in any order: what matters is which language it is."""
    words = [rng.choice(language.words) for _ in range(rng.randint(3, 9))]
    joint = "" if language.name in ("Chinese", "Japanese", "Thai") else " "
    text = joint.join(words) + rng.choice(("", "?", ".", "!", "?"))
    return text[:1].upper() + text[1:]


def _loosely(text: str, language: Language, rng: random.Random) -> str:
    """The text in a hurry, perhaps without its accents."""
    if language.is_latin and rng.random() < 0.25:
        text = plain(text)
    return loosely(text.lstrip("¿¡") if rng.random() < 0.3 else text, rng)


def _reply(language: Language, rng: random.Random) -> str:
    if rng.random() < _GREETS:
        return GREETED.format(greeting=language.greeting)
    return rng.choice(ONLY_ENGLISH)
