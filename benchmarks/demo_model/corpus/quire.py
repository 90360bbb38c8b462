"""Questions about Quire itself: what it is, how it is used, what the words of LLM serving mean, what goes wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence

from benchmarks.demo_model.corpus import unknown
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Message, Question, Reply, assistant, loosely, user
from benchmarks.demo_model.corpus.names import items
from benchmarks.demo_model.corpus.quire_data import CLIENT, Subject, subjects, with_client, with_curl
from benchmarks.demo_model.corpus.quire_phrasings import AGAIN, FOLLOW_UPS
from benchmarks.demo_model.corpus.topics import is_kept, sentence, typed

SUBJECTS = subjects()
CONCEPTS = [subject for subject in SUBJECTS if subject.kind == "concept"]
MANNERS = (  # what the user says to an answer, and what to say to that
    (
        ("Thanks.", "Thank you!", "Thanks a lot.", "Okay, thanks.", "Great, thank you."),
        ("You are welcome. Ask me more if you like.", "You are welcome!"),
    ),
    (
        ("Got it.", "I see.", "Okay.", "Ok", "Good to know.", "Interesting.", "Cool!", "Nice."),
        ("Good. What else would you like to know?", "Good. Ask me more if you like."),
    ),
)
# what the model was not taught; training never names those of NEW_STRANGERS
STRANGERS = items("""\
Redis|Kafka|Postgres|MySQL|Django|Flask|Excel|Photoshop|Linux kernels|Terraform|Ansible|Jenkins|Hadoop|Spark|Blender
Unity|React|Angular|Firefox|Git|SQL|Java|COBOL|blockchain|quantum physics|football|chess|cooking|astrology|gardening
MongoDB|Elasticsearch|TensorFlow|WordPress|Rust|Haskell""")
NEW_STRANGERS = items("Cassandra Vue Perl RabbitMQ knitting Minecraft")
DO_NOT_KNOW = unknown.REFUSALS


def exchange(rng: random.Random) -> list[Message]:
    """Return a question about Quire, its answer, and some turns that follow from it."""
    if rng.random() < 0.03:
        stranger = rng.choice(STRANGERS)
        asked = rng.choice(CONCEPTS[0].templates().seen).format(x=stranger, t=stranger)
        return [user(_typed(asked, rng)), assistant(rng.choice(DO_NOT_KNOW))]
    subject = rng.choice(SUBJECTS)
    told = [rng.choice(subject.answers)]  # about this subject
    messages = [user(ask(subject, rng)), assistant(told[0])]
    while rng.random() < 0.45:
        kind = rng.choice((*follow_ups_of(subject), "more", "thanks", "again", rng.choice("escpw")))
        if kind == "thanks":
            said, answers = rng.choice(MANNERS)
            return [*messages, user(rng.choice(said)), assistant(rng.choice(answers))]
        if kind == "again":
            subject = rng.choice(CONCEPTS)
            told = [rng.choice(subject.answers)]
            again = subject.fill(rng.choice(AGAIN.seen), _name(subject, rng))
            messages += [user(loosely(again, rng)), assistant(told[0])]
        elif (answer := follow_up(subject, kind, told, rng)) not in told:
            told.append(answer)
            messages += [user(loosely(rng.choice(FOLLOW_UPS[kind].seen), rng)), assistant(answer)]
    return messages


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end, some of them long."""
    while True:
        count = rng.choice((1, 1, 1, 1, 2, 2, 3, 5))
        yield Dialogue([message for _ in range(count) for message in exchange(rng)])


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: single questions, and ones that need the turn before them."""
    single = [_question(held_out, rng) for held_out in ("nothing", "phrasing", "pair") for _ in range(60)]
    unknown = [_unknown(stranger, rng) for stranger in NEW_STRANGERS]
    return single + unknown + [_followed("phrasing" if number % 2 else "nothing", rng) for number in range(80)]


def ask(subject: Subject, rng: random.Random) -> str:
    """Return a question about the subject, for training."""
    return _typed(_seen(subject, rng), rng)


def follow_ups_of(subject: Subject) -> list[str]:
    """Return the kinds of follow-up that the subject itself answers."""
    kinds = [letter for letter in "eswc" if subject.extras[letter]]
    return kinds + ["p"] * any(request.startswith('"') for request in subject.extras["c"])


def follow_up(subject: Subject, kind: str, told: Sequence[str], rng: random.Random) -> str:
    """Return the answer to a follow-up, also where the subject has none of that kind."""
    if kind == "more":
        others = [answer for answer in subject.answers if answer not in told]
        return rng.choice(others or ["That is all I know about it. The documentation says more."])
    if kind == "c":
        request = next(iter(subject.extras["c"]), "")
        return with_curl(request) if request else f"A chat request with curl looks like this: {with_curl('')}"
    if kind == "p":
        request = next((request for request in subject.extras["c"] if request.startswith('"')), "")
        return with_client(request) if request else f"Make a client, then call it: {CLIENT}"
    if subject.extras[kind]:
        return rng.choice(subject.extras[kind])
    shortest = min(subject.answers, key=len).split(". ")[0].rstrip(".")
    return {
        "e": "I have no example for that. The documentation may have one.",
        "s": f"In short: {shortest[:1].lower() + shortest[1:] if shortest[:2] in ('A ', 'It') else shortest}.",
        "w": "I do not know the reason. The documentation says more.",
    }[kind]


def is_held_out(text: str) -> bool:
    """Whether this template filled in with this name is kept for scoring, with or without its question mark."""
    return is_kept(text.rstrip("?.! "))


def contains(keys: Sequence[Sequence[str]]) -> Callable[[Reply], bool]:
    """Whether a reply has one key of each group, at the beginning of a word."""
    ways = ["|".join(rf"(?<!\w){re.escape(key.strip())}" for key in group) for group in keys]
    found = [re.compile(way, re.IGNORECASE) for way in ways]
    return lambda reply: all(pattern.search(reply.content) for pattern in found)


def resembles(*texts: str) -> Callable[[Reply], bool]:
    """Whether a reply shares most of its words with one of the texts."""

    def shares(reply: Reply) -> bool:
        words = _words(reply.content)
        return any(len([word for word in _words(text) if word in words]) >= 0.6 * len(_words(text)) for text in texts)

    return shares


def _words(text: str) -> list[str]:
    return re.findall(r"[\w.:/_-]+", text.casefold())


def _typed(text: str, rng: random.Random) -> str:
    return typed("{text}", {"text": text}, rng) if "{" in text else typed(text, {}, rng)


def _name(subject: Subject, rng: random.Random) -> str:
    return rng.choice((subject.names[0], rng.choice(subject.names)))


def _seen(subject: Subject, rng: random.Random) -> str:
    """A way to ask that is not kept for scoring: own phrasings and templates, about half of each."""
    templates = subject.templates().seen
    if subject.asked.seen and (not templates or rng.random() < 0.4):
        return rng.choice(subject.asked.seen)
    while is_held_out(text := subject.fill(rng.choice(templates), _name(subject, rng))):
        pass
    return text


def _question(held_out: HeldOut, rng: random.Random) -> Question:
    while True:
        subject = rng.choice(SUBJECTS)
        text = _seen(subject, rng)
        if held_out == "phrasing":
            ways = [subject.fill(way, name) for way in subject.templates().unseen for name in subject.names]
            text = rng.choice([*ways, *list(subject.asked.unseen) * 3])
        elif held_out == "pair":
            ways = [subject.fill(way, name) for way in subject.templates().seen for name in subject.names]
            kept = [way for way in ways if is_held_out(way)]
            if not kept:
                continue
            text = rng.choice(kept)
        answer = rng.choice(subject.answers)
        return Question("quire", [user(sentence(text))], contains(subject.keys), held_out, example=answer)


def _unknown(stranger: str, rng: random.Random) -> Question:
    text = f"What is {stranger}?"
    return Question("quire: unknown", [user(text)], contains([["I "], ["not"]]), "pair",
                    example=rng.choice(DO_NOT_KNOW))  # fmt: skip


def _followed(held_out: HeldOut, rng: random.Random) -> Question:
    subject = rng.choice([subject for subject in SUBJECTS if follow_ups_of(subject)])
    kind = rng.choice(follow_ups_of(subject))
    told = rng.choice(subject.answers)
    right = [follow_up(subject, kind, [told], rng)]
    right += [text for text in subject.extras.get(kind, ()) if kind != "c"]
    messages = [user(sentence(_seen(subject, rng))), assistant(told)]
    messages.append(user(FOLLOW_UPS[kind].score(rng, held_out)))
    return Question("quire follow-ups", messages, resembles(*right), held_out, example=right[0])
