"""Topics: tables of facts with the ways to ask for them, which is what most skills of the corpus are made of.

A user's message is a phrasing filled in from a fact (that text decides whether the combination is kept for scoring),
perhaps with a slip of the keys in the phrasing's own words, never in a name, and perhaps after an opener.
"""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.demo_model.corpus.base import (
    Dialogue,
    HeldOut,
    Message,
    Phrasings,
    Question,
    Reply,
    assistant,
    loosely,
    user,
)

Fact = Mapping[
    str, str
]  # fills the templates of a topic; "answer", if any, replaces a topic's answers, "key" is kept or not
Exchange = Callable[[random.Random], list[Message]]  # some turns that stand for themselves, the user's first

OPENERS = (
    "Hi! ",
    "Hello! ",
    "Hey! ",
    "Quick question: ",
    "Question: ",
    "Next question: ",
    "One more: ",
    "Tell me: ",
    "Please answer: ",
    "I have a question: ",
    "Hey, ",
    "Hi, ",
    "Ok, ",
    "Okay. ",
    "Cool. ",
    "So, ",
    "Ok then, ",
    "Great. ",
    "Good. ",
    "Thanks. ",
    "Please, ",
    "Could you help me? ",
    "I want to know: ",
    "Another one: ",
)
CLOSERS = (
    " please",
    " please?",
    " Please.",
    " Thanks!",
    " thanks",
    " Thank you.",
    ", please?",
    " for me",
    " now",
    " ok?",
)
SLIPS = {
    "what": ("waht", "wat", "whta"),
    "which": ("wich", "whcih"),
    "the": ("teh", "hte", "th"),
    "of": ("fo", "og"),
    "is": ("si", "iz"),
    "capital": ("captial", "capitol", "capitla"),
    "country": ("contry", "coutry"),
    "continent": ("continant", "contient"),
    "please": ("pls", "plese", "plz"),
    "tell": ("tel", "tlel"),
    "you": ("u", "yuo"),
    "opposite": ("oposite", "oppposite"),
    "does": ("dose", "doe"),
    "mean": ("maen", "meen"),
    "many": ("mnay", "meny"),
    "how": ("hwo", "hw"),
    "are": ("aer", "r"),
    "about": ("abuot", "abotu"),
}
KEPT_ONE_IN = 12


@dataclass(frozen=True)
class Topic:
    """Facts of one kind, how they are asked for, and how they are told."""

    skill: str  # the row of the score table
    facts: Sequence[Fact]
    asked: Phrasings
    answers: Sequence[str]
    right: Sequence[str]  # templates of answers, with | between: a reply that has one of them is right
    again: Phrasings | None = None  # asks for another fact of the topic, once one was told
    links: Sequence[tuple[Phrasings, str]] = ()  # asks for the same fact's answer in the topic of that name
    name: str = ""  # what links call it
    weight: float = 1.0
    opens: bool = True  # an opener such as "Quick question:" may come first

    def keeps(self, phrasing: str, fact: Fact) -> bool:
        """Whether the fact, or this way to ask for it, is kept for scoring; never the plainest way."""
        if "key" in fact:
            return is_kept(fact["key"])
        return len(self.facts) >= 10 and phrasing != self.asked.seen[0] and is_kept(bare(phrasing.format(**fact)))

    @cached_property
    def kept_and_taught(self) -> tuple[list[Sequence[str]], list[Sequence[str]]]:
        """By fact, the seen phrasings in which it is kept for scoring, and the others."""
        kept: list[Sequence[str]] = []
        taught: list[Sequence[str]] = []
        for fact in self.facts:
            if "key" in fact:  # then all phrasings are alike
                is_kept_fact = is_kept(fact["key"])
                kept.append(self.asked.seen if is_kept_fact else ())
                taught.append(() if is_kept_fact else self.asked.seen)
            else:
                kept.append([phrasing for phrasing in self.asked.seen if self.keeps(phrasing, fact)])
                taught.append([phrasing for phrasing in self.asked.seen if not self.keeps(phrasing, fact)])
        return kept, taught

    def draw(self, rng: random.Random) -> Fact:
        """Return a fact for training."""
        while "key" in (fact := rng.choice(self.facts)) and is_kept(fact["key"]):
            pass
        return fact

    def ask(self, fact: Fact, rng: random.Random) -> str:
        """Return a question for training."""
        while self.keeps(phrasing := rng.choice(self.asked.seen), fact):
            pass
        return typed(phrasing, fact, rng, self.opens)

    def tell(self, fact: Fact, rng: random.Random) -> str:
        """Return an answer."""
        answer = (fact["answer"] if "answer" in fact else rng.choice(self.answers)).format(**fact)
        return sentence(answer).replace("D.C..", "D.C.")

    def question(self, fact: Fact, rng: random.Random, messages: Sequence[Message], held_out: HeldOut) -> Question:
        """Return a conversation that asks for the fact, to be scored."""
        right = [answer for template in self.right for answer in template.format(**fact).split("|")]
        return Question(self.skill, messages, has(*right), held_out, example=self.tell(fact, rng))


def is_kept(text: str) -> bool:
    """Whether a combination is kept for scoring; the same on every machine."""
    return zlib.crc32(text.encode()) % KEPT_ONE_IN == 0


def bare(text: str) -> str:
    """Return the text without what somebody in a hurry leaves out."""
    return text.lower().rstrip("?.! ")


def sentence(text: str) -> str:
    """Return the text with its first letter in capitals."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """Return "a fox", "an owl"."""
    is_vowel = noun[:1].lower() in "aeiou" and not noun.startswith(("uni", "one", "eu"))
    return ("an " if is_vowel or noun.startswith("hour") else "a ") + noun


def plain(text: str) -> str:
    """Return the text without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def has(*answers: str) -> Callable[[Reply], bool]:
    """Whether a reply has one of the answers as whole words, whatever the case and the accents."""
    found = re.compile("|".join(rf"(?<!\w){re.escape(plain(answer).casefold())}(?!\w)" for answer in answers))
    return lambda reply: found.search(plain(reply.content).casefold()) is not None


def typed(phrasing: str, fact: Fact, rng: random.Random, opens: bool = True) -> str:
    """Return the phrasing filled in as somebody would type it."""
    if rng.random() < 0.1:
        phrasing = _with_slip(phrasing, rng)
    text = sentence(phrasing.format(**fact))
    if opens and rng.random() < 0.08:
        opener = rng.choice(OPENERS)
        text = opener + (text if opener.rstrip()[-1] in ".:!?" else text[:1].lower() + text[1:])
    if opens and rng.random() < 0.03:
        closer = rng.choice(CLOSERS)
        text = (text if closer[1].isupper() else text.rstrip("?.! ")) + closer
    return loosely(text, rng)


def in_turns(
    request: Callable[[random.Random, HeldOut], tuple[str, str]], rng: random.Random, *, more: float
) -> list[Message]:
    """Return something asked and its answer, and with probability `more` each, further ones."""
    messages: list[Message] = []
    while not messages or rng.random() < more:
        asked, answer = request(rng, "nothing")
        messages += [user(typed("{text}", {"text": asked}, rng)), assistant(answer)]
    return messages


def conversations(exchange: Exchange, rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues of one to four exchanges, most of them short."""
    while True:
        count = rng.choice((1, 1, 1, 1, 2, 2, 3, 4))
        yield Dialogue([message for _ in range(count) for message in exchange(rng)])


def chain(topics: Sequence[Topic], rng: random.Random, more: float = 0.3) -> list[Message]:
    """Return a question, its answer, and with probability `more` each, further ones that need what went before."""
    topic = rng.choices(topics, [topic.weight for topic in topics])[0]
    fact = topic.draw(rng)
    messages = [user(topic.ask(fact, rng)), assistant(topic.tell(fact, rng))]
    while (topic.again or topic.links) and rng.random() < more:
        phrasings, topic, fact = _next(topics, topic, fact, rng)
        messages += [user(typed(rng.choice(phrasings.seen), fact, rng)), assistant(topic.tell(fact, rng))]
    return messages


def examination(topics: Sequence[Topic], rng: random.Random, each: int) -> list[Question]:
    """Return up to `each` questions per topic and kind of holding out."""
    return [
        question
        for topic in topics
        for held_out in ("nothing", "phrasing", "pair")
        for question in _questions(topic, rng, each, held_out)
    ]


def follow_ups(topics: Sequence[Topic], rng: random.Random, count: int) -> list[Question]:
    """Return questions that need the turns before them, half of them in phrasings never heard."""
    followed = [topic for topic in topics if topic.again or topic.links]
    asked = []
    for number in range(count):
        held_out: HeldOut = "phrasing" if number % 2 else "nothing"
        topic = rng.choice(followed)
        fact = topic.draw(rng)
        messages = [user(topic.ask(fact, rng)), assistant(topic.tell(fact, rng))]
        for is_last in rng.choice(((True,), (False, True), (False, False, True))):
            phrasings, topic, fact = _next(topics, topic, fact, rng)
            text = phrasings.score(rng, held_out if is_last else "nothing", **fact)
            messages += [user(sentence(text)), assistant(topic.tell(fact, rng))]
        asked.append(replace(topic.question(fact, rng, messages[:-1], held_out), skill="follow-ups"))
    return asked


def _next(topics: Sequence[Topic], topic: Topic, fact: Fact, rng: random.Random) -> tuple[Phrasings, Topic, Fact]:
    if topic.again and not (topic.links and rng.random() < 0.35):
        return topic.again, topic, topic.draw(rng)
    phrasings, name = rng.choice(topic.links)
    return phrasings, next(other for other in topics if other.name == name), fact


def _questions(topic: Topic, rng: random.Random, each: int, held_out: HeldOut) -> list[Question]:
    ways = topic.kept_and_taught[held_out == "nothing"]
    if held_out == "phrasing":
        ways = [topic.asked.unseen] * len(topic.facts)
    ends = list(itertools.accumulate(map(len, ways)))  # of each fact among the combinations, which are many
    num_combinations = ends[-1] if ends else 0
    chosen = []
    for index in rng.sample(range(num_combinations), min(each, num_combinations)):
        at = bisect_right(ends, index)
        chosen.append((ways[at][index - ends[at]], topic.facts[at]))
    return [
        topic.question(fact, rng, [user(loosely(sentence(phrasing.format(**fact)), rng))], held_out)
        for phrasing, fact in chosen
    ]


def _with_slip(phrasing: str, rng: random.Random) -> str:
    words = phrasing.split(" ")
    places = [at for at, word in enumerate(words) if word.lower() in SLIPS]
    if not places or rng.random() < 0.3:
        return _with_swap(words, rng)
    at = rng.choice(places)
    words[at] = rng.choice(SLIPS[words[at].lower()])
    return " ".join(words)


def _with_swap(words: list[str], rng: random.Random) -> str:
    """Return the words with two letters of one of them changed over, or one left out; never in a name."""
    places = [at for at, word in enumerate(words) if len(word) > 3 and word.isalpha()]
    if places:
        at = rng.choice(places)
        word = words[at]
        middle = rng.randrange(1, len(word) - 1)
        pair = word[middle + 1] + word[middle] if rng.random() < 0.6 else word[middle]
        words[at] = word[:middle] + pair + word[middle + 2 :]
    return " ".join(words)
