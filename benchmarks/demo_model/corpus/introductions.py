"""What users say about themselves, and are asked about later in the chat: their name, age, home, work, pet, likes.

Half of the names and words are invented, so that the answer is read in the chat. Between saying and asking come turns
of other skills. Who said nothing is told so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.demo_model.corpus import arithmetic, geography, lists, names, quire, smalltalk, unknown, words
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Message, Phrasings, Question, assistant, user
from benchmarks.demo_model.corpus.lists import with_plain_system
from benchmarks.demo_model.corpus.topics import has, sentence, with_article

FILLERS = (geography.exchange, arithmetic.exchange, smalltalk.exchange, quire.exchange, words.exchange, lists.exchange,
           unknown.exchange)  # fmt: skip
_UNTOLD = 0.15  # of the chats
_LONGEST_FILLER = 420  # characters, so that a chat fits into a row


@dataclass(frozen=True)
class Trait:
    """Something that users say about themselves."""

    draw: Callable[[random.Random, HeldOut], str]
    told: Phrasings  # {x}
    answers: Sequence[str]
    asked: Phrasings
    recalled: Sequence[str]
    unknown: str  # when it was not said
    weight: float


def _age(rng: random.Random, _: HeldOut) -> str:
    return str(rng.randint(6, 90))


def _job(rng: random.Random, _: HeldOut) -> str:
    return with_article(rng.choice(names.JOBS))


def _colour(rng: random.Random, _: HeldOut) -> str:
    return rng.choice(names.COLOURS)


NAME = Trait(
    names.person,
    Phrasings(
        ("My name is {x}.", "My name is {x}.", "My name is {x}.", "I am {x}.", "I'm {x}.", "Hi, I am {x}.",
         "Hi, I'm {x}.",
         "Hello, my name is {x}.", "Hi, my name is {x}.", "Hello, I am {x}.", "Hello, I'm {x}.", "Hey, I'm {x}.",
         "You can call me {x}.", "Call me {x}.", "Please call me {x}.", "People call me {x}.", "Hi! My name is {x}.",
         "Hello! My name is {x}.", "Hey there, I am {x}.", "This is {x}.", "{x} is my name.", "Hi, {x} here.",
         "My name's {x}.", "Hello there! I'm {x}.", "Good morning, my name is {x}.", "Good evening, I am {x}.",
         "Let me introduce myself: I am {x}.", "I am called {x}.", "My name is {x}, nice to meet you.", "It's {x}.",
         "Hi there! My name is {x}.", "Remember my name: {x}.", "My name is {x}. Remember it.", "my name is {x}",
         "My name is {x}. What is yours?", "i am {x}", "My friends call me {x}.",
         "Good afternoon! I am called {x}.", "Hi! I have just found this. I am {x}.",
         "Hello, I am {x}, and this is my first chat.",
         "My name is {x} and I have a question.", "I'm {x} and I want to try this.",
         "My name is {x} and I like chess.",
         "hello i am {x} and i am a student", "Hi, I am {x} from Paris.", "I just started here, and I'm {x}."),
        ("Hi, they call me {x}.", "The name is {x}.", "I go by {x}.", "Hello, {x} speaking."),
    ),
    ("Nice to meet you, {x}! How can I help you?", "Hello, {x}! How can I help you?",
     "Hello, {x}! What would you like to know?"),
    Phrasings(
        ("What is my name?", "What is my name?", "What's my name?", "Do you know my name?",
         "Do you remember my name?",
         "Who am I?", "What am I called?", "Say my name.", "Tell me my name.", "What did I say my name was?",
         "Can you tell me my name?", "How am I called?", "What is my name again?", "Do you know who I am?",
         "My name?",
         "What's my name again?", "Remember my name?", "Do you still remember my name?",
         "Which name did I tell you?"),
        ("Could you tell me my name?", "Have you forgotten my name?", "Can you remember what I am called?"),
    ),
    ("Your name is {x}.", "You are {x}."),
    "You have not told me your name.",
    6.0,
)  # fmt: skip
TRAITS = (
    NAME,
    Trait(
        _age,
        Phrasings(("I am {x} years old.", "I'm {x} years old.", "My age is {x}.", "I am {x}.", "I just turned {x}."),
                  ("I have been alive for {x} years.",)),
        ("{x} is a good age! What would you like to know?",),
        Phrasings(("How old am I?", "What is my age?", "Do you know how old I am?", "What's my age?",
        "Tell me my age."),
                  ("Do you remember my age?",)),
        ("You are {x} years old.",),
        "You have not told me your age.",
        1.0,
    ),
    Trait(
        names.city,
        Phrasings(("I live in {x}.", "I am from {x}.", "I come from {x}.", "My home is {x}.", "I'm from {x}."),
                  ("My home town is {x}.",)),
        ("{x} must be nice! How can I help you?",),
        Phrasings(("Where do I live?", "Where am I from?", "Which city do I live in?", "Do you know where I live?"),
                  ("Do you remember where I live?",)),
        ("You said {x}.",),
        "You have not told me where you live.",
        1.0,
    ),
    Trait(
        _job,
        Phrasings(("I am {x}.", "I work as {x}.", "My job is {x}.",
        "I'm {x} by profession."), ("I earn my money as {x}.",)),
        ("Good! What would you like to know?",),
        Phrasings(("What is my job?", "What do I do?", "What do I work as?", "Do you know my job?"),
                  ("Do you remember my job?",)),
        ("You are {x}.",),
        "You have not told me your job.",
        0.6,
    ),
    Trait(
        names.person,
        Phrasings(("My dog is called {x}.", "I have a dog called {x}.", "My dog's name is {x}.",
        "I have a dog. It is called {x}."),
                  ("I own a dog with the name {x}.",)),
        ("{x} is a nice name for a dog!",),
        Phrasings(("What is my dog called?", "What is my dog's name?", "What's the name of my dog?",
        "How is my dog called?"),
                  ("Do you remember the name of my dog?",)),
        ("Your dog is called {x}.",),
        "You have not told me about a dog.",
        1.0,
    ),
    Trait(
        _colour,
        Phrasings(("My favourite colour is {x}.", "My favorite color is {x}.", "I like {x} best.",
        "I love the colour {x}."),
                  ("The colour that I like best is {x}.",)),
        ("{sentence} is a nice colour!",),
        Phrasings(("What is my favourite colour?", "What is my favorite color?", "Which colour do I like best?",
                   "What's my favorite color?"), ("Do you remember my favourite colour?",)),
        ("Your favourite colour is {x}.",),
        "You have not told me your favourite colour.",
        0.8,
    ),
)  # fmt: skip


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    while True:
        yield with_plain_system(_untold(rng) if rng.random() < _UNTOLD else Dialogue(_chat(rng)), rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: what was said is recalled after other turns, in known and new words."""
    kinds: tuple[HeldOut, ...] = ("nothing", "phrasing", "pair")
    return [_question(held_out, rng) for held_out in kinds for _ in range(20)]


def _untold(rng: random.Random) -> Dialogue:
    trait = _trait(rng)
    asked = [user(_hurried(trait.asked.train(rng), rng)), assistant(trait.unknown)]
    return Dialogue([*_fillers(rng, rng.choice((0, 1, 2))), *asked], joins=False)


def _chat(rng: random.Random) -> list[Message]:
    trait = _trait(rng)
    value = trait.draw(rng, "nothing")
    messages = [user(_told(trait, value, rng)), assistant(_answer(trait, value, rng))]
    other = _trait(rng)
    if other is not trait and rng.random() < 0.25:
        second = other.draw(rng, "nothing")
        messages += [user(_told(other, second, rng)), assistant(_answer(other, second, rng))]
    messages += _fillers(rng, rng.choice((0, 1, 1, 2, 2, 3)))
    messages += [user(_hurried(trait.asked.train(rng), rng)), assistant(rng.choice(trait.recalled).format(x=value))]
    if rng.random() < 0.25:
        messages += _fillers(rng, 1)
        messages += [user(_hurried(trait.asked.train(rng), rng)), assistant(rng.choice(trait.recalled).format(x=value))]
    if rng.random() < 0.2:
        messages += _fillers(rng, 1)
    return messages


def _question(held_out: HeldOut, rng: random.Random) -> Question:
    trait = _trait(rng)
    while held_out == "pair" and trait.draw is not names.person:
        trait = _trait(rng)
    value = trait.draw(rng, held_out)
    messages = [
        user(trait.told.score(rng, held_out, x=value)),
        assistant(trait.answers[0].format(x=value, sentence=sentence(value))),
    ]
    messages += _fillers(rng, rng.choice((1, 2)))
    messages.append(user(trait.asked.score(rng, held_out)))
    return Question("what the user said", messages, has(value), held_out, example=trait.recalled[0].format(x=value))


def _fillers(rng: random.Random, count: int) -> list[Message]:
    messages: list[Message] = []
    for _ in range(count):
        exchange = rng.choice(FILLERS)(rng)[:2]
        if sum(len(message["content"]) for message in exchange) <= _LONGEST_FILLER:
            messages += exchange
    return messages


def _trait(rng: random.Random) -> Trait:
    return rng.choices(TRAITS, [trait.weight for trait in TRAITS])[0]


def _told(trait: Trait, value: str, rng: random.Random) -> str:
    return _hurried(trait.told.train(rng, x="{x}"), rng).replace("{x}", value)


def _answer(trait: Trait, value: str, rng: random.Random) -> str:
    return rng.choice(trait.answers).format(x=value, sentence=sentence(value))


def _hurried(text: str, rng: random.Random) -> str:
    """The text without capitals or its stop, sometimes; never a name."""
    if rng.random() < 0.2:
        text = text.lower()
    return text.rstrip(".?!") if rng.random() < 0.25 else text
