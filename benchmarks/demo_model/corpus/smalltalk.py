"""Small talk: greetings, who the model is and what it can do, jokes, riddles, facts, and honest refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from benchmarks.demo_model.corpus import smalltalk_data as data
from benchmarks.demo_model.corpus import smalltalk_jokes as fun
from benchmarks.demo_model.corpus import smalltalk_newcomers as newcomers
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Message, Phrasings, Question, Reply, assistant, user
from benchmarks.demo_model.corpus.cards import cards
from benchmarks.demo_model.corpus.geography_records import RECORDS
from benchmarks.demo_model.corpus.topics import Fact, Topic, chain, conversations, examination, has, sentence, typed

NUM_CARDS_ASKED = 130


@cache
def topics() -> list[Topic]:
    """Return what can be said and asked outside the other skills."""
    talk = [*cards("small talk", data.CARDS, 10, opens=False), *cards("small talk", newcomers.CARDS, 9, opens=False)]
    return [*talk, *_refusals(4)]


def exchange(rng: random.Random) -> list[Message]:
    """Return some turns of small talk that stand for themselves."""
    kinds: tuple[Callable[[random.Random], list[Message]], ...] = (_talk, _jokes, _riddle, _facts)
    return rng.choices(kinds, (12, 2, 2, 2))[0](rng)


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    return conversations(exchange, rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination."""
    talk = [topic for topic in topics() if topic.skill == "small talk"]
    refusals = [topic for topic in topics() if topic.skill == "refusals"]
    return [
        *rng.sample(examination(talk, rng, 1), NUM_CARDS_ASKED),
        *examination(refusals, rng, 2),
        *_fun_questions(rng),
    ]


def _talk(rng: random.Random) -> list[Message]:
    return chain(topics(), rng)


def _jokes(rng: random.Random) -> list[Message]:
    return _series(fun.JOKES.splitlines(), fun.JOKE_REQUESTS[0], rng)


def _facts(rng: random.Random) -> list[Message]:
    return _series(_statements(), fun.FACT_REQUESTS[0], rng)


def _series(lines: Sequence[str], requests: Sequence[str], rng: random.Random) -> list[Message]:
    """Return a request and a line, and perhaps requests for more; no line twice."""
    count = rng.choice((1, 1, 1, 2, 2, 3))
    messages = []
    for at, line in enumerate(rng.sample(lines, count)):
        ways = fun.MORE if lines[0] not in fun.JOKES else fun.MORE_JOKES[0]
        messages += [user(typed(rng.choice(ways if at else requests), {}, rng, opens=False)), assistant(line)]
    return messages


def _riddle(rng: random.Random) -> list[Message]:
    riddle, answer = rng.choice(fun.RIDDLES.splitlines()).split("|")
    messages = [user(typed(rng.choice(fun.RIDDLE_REQUESTS[0]), {}, rng, opens=False)), assistant(riddle)]
    kind = rng.random()
    if kind < 0.4:
        messages += [user(typed(rng.choice(fun.GIVE_UPS[0]), {}, rng, opens=False)), assistant(f"It is {answer}.")]
    elif kind < 0.9:
        others = [line.split("|")[1] for line in fun.RIDDLES.splitlines()]
        guess = answer if kind < 0.65 else rng.choice(others)
        way = rng.choice(("{guess}?", "Is it {guess}?", "{guess}!", "I think it is {guess}.", "It is {guess}."))
        verdict = f"Yes, it is {answer}!" if guess == answer else f"No, it is {answer}."
        messages += [user(typed(way, {"guess": guess.replace("your", "my")}, rng, opens=False)), assistant(verdict)]
    if len(messages) > 2 and rng.random() < 0.3:
        other = rng.choice([line.split("|")[0] for line in fun.RIDDLES.splitlines() if not line.startswith(riddle)])
        messages += [user(typed(rng.choice(fun.MORE_RIDDLES), {}, rng, opens=False)), assistant(other)]
    return messages


@cache
def _statements() -> tuple[str, ...]:
    """Return sentences of the tables that are worth telling."""
    found = [topic.answers[0] for topic in cards("", RECORDS, 1)]
    return tuple(text for text in found if len(text) > 30)


def _refusals(weight: float) -> list[Topic]:
    rows = [line.split("|") for line in data.UNKNOWN.splitlines()]
    refused = []
    for unknown, right, asked, things in rows:
        ways = [way.replace("{}", "{thing}") for way in asked.split(";")]
        phrasings = Phrasings(
            [way for way in ways if not way.startswith("*")], [way[1:] for way in ways if way.startswith("*")]
        )
        facts: list[Fact] = [
            {"thing": thing, "instead": instead} for thing in things.split(";") for instead in data.INSTEAD
        ]
        answers = [f"{refusal} {{instead}}" for refusal in data.REFUSALS[unknown]]
        refused.append(Topic("refusals", facts, phrasings, answers, right.split(";"), weight=weight / len(rows)))
    return refused


def _fun_questions(rng: random.Random) -> list[Question]:
    jokes, riddles = fun.JOKES.splitlines(), [line.split("|") for line in fun.RIDDLES.splitlines()]
    scored = []
    kinds: tuple[tuple[HeldOut, int], ...] = (("nothing", 0), ("phrasing", 1))
    for held_out, at in kinds:
        for request in rng.sample(fun.JOKE_REQUESTS[at], 3):
            scored.append(_fun([user(request)], jokes, held_out))
        first, second = rng.sample(jokes, 2)
        for request in rng.sample(fun.MORE_JOKES[at], 2):
            before = [user("Tell me a joke."), assistant(first), user(request)]
            scored.append(_fun(before, [second, *(joke for joke in jokes if joke != first)], held_out))
        for request in rng.sample(fun.RIDDLE_REQUESTS[at], 2):
            scored.append(_fun([user(request)], [riddle for riddle, _ in riddles], held_out))
        for request in rng.sample(fun.FACT_REQUESTS[at], 2):
            scored.append(_fun([user(request)], _statements(), held_out))
        for riddle, answer in rng.sample(riddles, 4):
            messages = [user("Tell me a riddle."), assistant(riddle), user(rng.choice(fun.GIVE_UPS[at]))]
            scored.append(Question("jokes and riddles", messages, has(answer), held_out, example=f"It is {answer}."))
    return scored


def _fun(messages: Sequence[Message], lines: Sequence[str], held_out: HeldOut) -> Question:
    """Return a question that any of the lines answers, told in full."""

    def is_right(reply: Reply) -> bool:
        return any(line in reply.content for line in lines)

    return Question("jokes and riddles", messages, is_right, held_out, example=sentence(lines[0]))
