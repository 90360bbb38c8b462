"""What the model does not know, asked for as what it knows is: it says that it does not know, and what it does know.

Half of the subjects are words that no table has, and words that nobody has: a refusal must come from not knowing the
word, not from knowing that it is refused. No refusal repeats the word, since unknown words are often copied wrong.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache

from benchmarks.demo_model.corpus import names
from benchmarks.demo_model.corpus import unknown_data as data
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Message, Phrasings, Question, user
from benchmarks.demo_model.corpus.geography_data import COUNTRIES
from benchmarks.demo_model.corpus.lists import plain_conversations
from benchmarks.demo_model.corpus.quire_data import subjects
from benchmarks.demo_model.corpus.topics import has, in_turns, is_kept, sentence, with_article
from benchmarks.demo_model.corpus.words_definitions import DEFINITIONS

KNOWN = "Ask me about Quire, capitals, small sums or words."
I_KNOW = "I know Quire, capitals, small sums and simple words."
REFUSALS = (
    f"I do not know that: I am a small demo model. {KNOWN}",
    f"I am sorry, I do not know that. {KNOWN}",
    f"I was not taught about that. {I_KNOW}",
    f"That is not something I know. {I_KNOW}",
)
OF_PEOPLE = (f"I am sorry, I learned nothing about famous people. {KNOWN}",)
OF_EVENTS = (f"I am sorry, I learned nothing about history. {KNOWN}",)
OF_DEEDS = (
    f"I am sorry, I never learned how to do that. {KNOWN}",
    f"I do not know how that is done. {I_KNOW}",
)
OF_CHOICES = (
    f"I cannot recommend anything: I am a small demo model. {KNOWN}",
    f"I am sorry, I have no advice on that. {I_KNOW}",
)
OF_DETAILS = (
    "I do not know that. Of places I know the capital and the continent.",
    "I am sorry, I only know the capital and the continent of a place.",
)

THING = Phrasings(
    ("What is {x}?", "What is {x}?", "What is {x}?", "What's {x}?", "What does {t} mean?", "Explain {x}.",
     "Define {t}.",
     "Explain {x} to me.", "Please explain {x}.", "Can you explain {x}?", "Could you explain what {x} is?",
     "Tell me about {x}.", "Tell me what {x} is.", "Describe {x}.", "What do you know about {x}?", "{t}?", "{t}",
     "Do you know what {x} is?", "I do not understand {x}.", "I want to know what {x} is.", "Do you know {x}?",
     "I read about {x}. What is it?", "{t}: what is that?", "How does {x} work?", "Tell me more about {x}.",
     "Explain {x} in simple words.", "Explain {x} like I am five.", "Tell me everything about {x}.",
     "What is {x} used for?", "What is {x} good for?", "What is the meaning of {t}?", "Give me facts about {x}.",
     "What can you tell me about {x}?", "Where does {x} come from?", "Who invented {x}?",
     "What is special about {x}?",
     "What is so great about {x}?", "Is {x} good?", "Have you heard of {x}?", "Can you tell me about {x}?",
     "What's the deal with {x}?", "How do I use {x}?", "Do you like {x}?", "Why is {x} important?", "I love {x}!",
     "Compare {x} and {y}.", "What is the difference between {x} and {y}?", "Is {x} better than {y}?", "{x} or {y}?",
     "Give me an introduction to {x}.", "Teach me about {x}.", "Help me with {x}."),
    ("What exactly is {x}?", "How would you explain {x} to a child?", "Could you tell me something about {x}?",
     "Give me an overview of {x}.", "I keep reading about {x}. What is it?"),
)  # fmt: skip
PERSON = Phrasings(
    ("Who is {x}?", "Who was {x}?", "Who is {x}?", "Tell me about {x}.", "When was {x} born?", "What did {x} do?",
     "Do you know {x}?", "What do you know about {x}?", "Where was {x} born?", "When did {x} die?", "How old is {x}?",
     "What is {x} famous for?", "Is {x} still alive?", "Have you heard of {x}?", "{x}?", "Tell me who {x} is.",
     "What do you think about {x}?", "Do you like {x}?", "Write a biography of {x}.", "How tall is {x}?",
     "Who is {x} married to?", "What is your opinion on {x}?", "Why is {x} famous?"),
    ("Do you know who {x} is?", "Can you tell me who {x} was?", "What's your opinion of {x}?"),
)  # fmt: skip
EVENT = Phrasings(
    ("When was {x}?", "What was {x}?", "Tell me about {x}.", "What caused {x}?", "When did {x} begin?",
     "Who won {x}?",
     "Explain {x}.", "What happened in {x}?", "Why did {x} happen?", "How long was {x}?", "When did {x} end?",
     "What do you know about {x}?", "Give me a summary of {x}.", "What were the effects of {x}?"),
    ("How did {x} start?", "What led to {x}?"),
)  # fmt: skip
DEED = Phrasings(
    ("How do I {x}?", "How do I {x}?", "How do you {x}?", "How can I {x}?", "How to {x}?", "How to {x}",
     "Teach me to {x}.",
     "Tell me how to {x}.", "I want to {x}.", "Help me {x}.", "Can you help me {x}?", "What do I need to {x}?",
     "Explain how to {x}.", "Show me how to {x}.", "Can you {x}?", "What is the best way to {x}?",
     "I need to {x}. How?",
     "Is it hard to {x}?", "How long does it take to {x}?", "Should I {x}?"),
    ("What would I do to {x}?", "Give me tips on how to {x}.", "What's the easiest way to {x}?"),
)  # fmt: skip
CHOICE = Phrasings(
    ("What is the best {x}?", "Recommend {a_x}.", "Which {x} should I buy?", "Which {x} is the best?",
     "I need a new {x}.",
     "Suggest {a_x}.", "Can you recommend {a_x}?", "What is a good {x}?", "What {x} do you like?",
     "What's your favourite {x}?",
     "What is a cheap {x}?", "Help me choose {a_x}.", "What do you think of my {x}?", "Find me {a_x}."),
    ("Could you suggest a good {x}?", "Which {x} would you take?"),
)  # fmt: skip
DETAIL = Phrasings(
    ("What is the {x} of {place}?", "What's the {x} of {place}?", "Tell me the {x} of {place}.", "{place} {x}?",
     "Do you know the {x} of {place}?", "Tell me about the {x} of {place}.", "Who or what is the {x} of {place}?",
     "How is the {x} of {place}?", "I need the {x} of {place}."),
    ("Could you tell me the {x} of {place}?", "Give me the {x} of {place}."),
)  # fmt: skip
OPEN = Phrasings(
    ("Why do {many} {act}?", "How do {many} {act}?", "Can {many} {act}?", "Do {many} {act}?", "When do {many} {act}?",
     "Where do {many} {act}?", "Do all {many} {act}?", "Why are {many} so {how}?", "Are {many} {how}?",
     "How long do {many} live?", "How old do {many} get?", "Who likes {many}?",
     "How many {many} are there in the world?",
     "What do {many} do all day?", "What do {many} eat?", "What are {many} afraid of?", "How big is {x}?",
     "Is {x} {how}?",
     "How heavy is {x}?", "How much does {x} weigh?", "How fast is {x}?", "How old is {x}?", "When was {x} invented?",
     "Where can I buy {x}?", "Where can I find {x}?", "How is {x} made?", "How do I make {x}?", "How do I draw {x}?",
     "How do I repair {x}?", "What is inside {x}?", "Why do I need {x}?", "What happens if I eat {x}?",
     "Who was the first to have {x}?", "What is the best {t}?", "What is the oldest {t}?", "Which {t} is the best?",
     "What is the most expensive {t}?", "Should I get {x}?", "Is it good to have {x}?", "Can you show me {x}?",
     "Tell me the history of {x}.", "Why is {x} called {t}?", "What kinds of {many} are there?", "I lost my {t}.",
     "My {t} is broken.", "What is wrong with my {t}?", "Can I eat {x}?", "Is {x} dangerous for children?"),
    ("Why would {many} {act}?", "What size is {x}?", "Who made the first {t}?", "What do you think of {many}?"),
)  # fmt: skip
NO_PLACE = Phrasings(
    ("What is the capital of {x}?", "Capital of {x}?", "{x} capital?", "On which continent is {x}?", "Where is {x}?",
     "Tell me the capital of {x}.", "What is {x}'s capital?", "In which country is {x}?",
     "Which continent is {x} in?"),
    ("Which city is the capital of {x}?",),
)  # fmt: skip
OF_NO_PLACE = ("I do not know a place of that name.",)
_PLACES = [line.split("|")[0] for lines in COUNTRIES.values() for line in lines.splitlines()]
_KINDS = {
    "thing": 12,
    "person": 2.5,
    "event": 1.5,
    "deed": 3.5,
    "choice": 1,
    "detail": 1.5,
    "odd": 3,
    "open": 4,
    "no place": 0.8,
}


def exchange(rng: random.Random) -> list[Message]:
    """Return a question to which the model has no answer, and its refusal; sometimes another one after it."""
    return in_turns(_request, rng, more=0.15)


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end, some after a system prompt that changes nothing."""
    return plain_conversations(exchange, rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: unknown things in wordings and of names that training may not have."""
    kinds: tuple[HeldOut, ...] = ("nothing", "phrasing", "pair")
    return [_question(held_out, rng) for held_out in kinds for _ in range(30)]


def stranger(rng: random.Random, held_out: HeldOut = "nothing") -> tuple[str, str]:
    """Return an unknown thing as in a sentence, and alone: ("an otter", "otter")."""
    while True:
        draw = rng.random()
        if draw < 0.36:
            name = called = rng.choice(data.SUBJECTS)
        elif draw < 0.68:
            called = rng.choice(data.THINGS)
            name = with_article(called)
        else:
            called = _word_of_nobody(rng)
            name = with_article(called) if draw < 0.84 else called
            if draw > 0.94:
                name = called = called.capitalize()
        if is_kept(f"unknown {called.lower()}") == (held_out == "pair") and not _is_known(called):
            return name, called


def _question(held_out: HeldOut, rng: random.Random) -> Question:
    asked, answer = _request(rng, held_out)
    admits = has("not", "nothing", "never", "cannot", "sorry", "only", "no", "no opinions")
    return Question("unknown", [user(sentence(asked))], admits, held_out, example=answer)


def _request(rng: random.Random, held_out: HeldOut) -> tuple[str, str]:
    kind = "thing" if held_out == "pair" else rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    if kind == "odd" and held_out == "nothing":
        return rng.choice([text for text in data.ODD if not is_kept(text)]), rng.choice(REFUSALS)
    if kind == "person":
        name = rng.choice(data.PEOPLE)
        if rng.random() < 0.35:
            name = f"{names.person(rng, 'nothing')} {names.coined(rng).capitalize()}"
        return PERSON.score(rng, held_out, x=name), rng.choice(OF_PEOPLE)
    if kind == "open":
        thing = rng.choice(data.THINGS) if rng.random() < 0.5 else rng.choice(_known_list())
        said = OPEN.score(rng, held_out, x=with_article(thing), t=thing, many=_many(thing),
                          act=rng.choice(data.ACTS), how=rng.choice(data.QUALITIES))  # fmt: skip
        return said, rng.choice(REFUSALS)
    if kind == "no place":
        return NO_PLACE.score(rng, held_out, x=_word_of_nobody(rng).capitalize()), rng.choice(OF_NO_PLACE)
    if kind == "event":
        return EVENT.score(rng, held_out, x=rng.choice(data.EVENTS)), rng.choice(OF_EVENTS)
    if kind == "deed":
        return DEED.score(rng, held_out, x=rng.choice(data.DEEDS)), rng.choice(OF_DEEDS)
    if kind == "choice":
        thing = rng.choice(data.CHOICES)
        return CHOICE.score(rng, held_out, x=thing, a_x=with_article(thing)), rng.choice(OF_CHOICES)
    if kind == "detail":
        asked = DETAIL.score(rng, held_out, x=rng.choice(data.DETAILS), place=rng.choice(_PLACES))
        return asked, rng.choice(OF_DETAILS)
    (name, called), (other, _) = stranger(rng, held_out), stranger(rng, held_out)
    return THING.score(rng, held_out, x=name, t=called, y=other), rng.choice(REFUSALS)


def _word_of_nobody(rng: random.Random) -> str:
    """A word that is in no table: coined, or a known one with a slip or another end."""
    if rng.random() < 0.6:
        return names.coined(rng)
    word = rng.choice(_known_list())
    at = rng.randrange(1, len(word))
    draw = rng.random()
    if draw < 0.4:
        return word[:at] + rng.choice("abcdefghiklmnoprstuvw") + word[at + 1 :]
    return word[:at] + rng.choice(_known_list())[-rng.randint(2, 4) :]


def _many(noun: str) -> str:
    """The plural, by the rule."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def _is_known(called: str) -> bool:
    known = _known_words()
    return called.lower() in known or called.lower().rstrip("s") in known


@cache
def _known_list() -> list[str]:
    lines = (line.removeprefix("-").split("|")[0] for line in DEFINITIONS.splitlines())
    return sorted(word for word in lines if word.isalpha() and len(word) > 3)


@cache
def _known_words() -> frozenset[str]:
    """Every word that a table explains, and every word in a name of what it explains about Quire."""
    found = {line.removeprefix("-").split("|")[0] for line in DEFINITIONS.splitlines()}
    for subject in subjects():
        for name in subject.names:
            found.add(name.lower())
            found.update(re.findall(r"[\w-]+", name.lower()))
    found.update(place.lower() for place in _PLACES)
    found.update(("moon", "sun", "rainbow", "water", "love", "mountains", "music"))
    return frozenset(found)
