"""Thinking: a few short steps before the answer where the template's enable_thinking is on, and none where it is off.

Where thinking is off and the user asks for steps all the same, the steps are part of the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.demo_model.corpus import mixture, quire
from benchmarks.demo_model.corpus import thinking_phrasings as ways
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Question, Reply, assistant, loosely, system, user
from benchmarks.demo_model.corpus.geography import Place, places
from benchmarks.demo_model.corpus.held_out import keeps_comparison, keeps_sum
from benchmarks.demo_model.corpus.names import PEOPLE, WORDS, coined, items
from benchmarks.demo_model.corpus.replies import with_reasoning
from benchmarks.demo_model.corpus.topics import has, is_kept, sentence

BASES = (
    "geography",
    "arithmetic",
    "words",
    "smalltalk",
    "quire",
    "unknown",
    "requests",
    "lists",
)  # answered without thinking where it is off
THINGS = items("apples books pens cards coins eggs flowers nuts pears shells stamps")


@dataclass(frozen=True)
class Problem:
    """Something to think about, with the steps and the answer."""

    kind: str
    text: str
    steps: Sequence[str]
    answer: str
    right: Callable[[Reply], bool]


def sums(rng: random.Random, held_out: HeldOut) -> Problem:
    """Two operations on small numbers, from the left to the right."""
    while True:
        a, b, c = rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 20)
        x, y = rng.choice(("++", "++", "+-", "-+"))
        first = a + b if x == "+" else a - b
        last = first + c if y == "+" else first - c
        is_free = not keeps_sum(a, x, b) and not keeps_sum(first, y, c)
        if last >= 0 <= first and is_free and is_kept(f"{a} {x} {b} {y} {c}") == (held_out == "pair"):
            break
    steps = [f"First, {a} {x} {b} = {first}.", f"Then {first} {y} {c} = {last}."]
    if x + y == "++" and rng.random() < 0.35:
        values = {"who": rng.choice(PEOPLE), "things": rng.choice(THINGS)}
        text = ways.STORY.score(rng, held_out, a=a, b=b, c=c, **values)
        return Problem("sums", text, steps, f"There are {last} {values['things']}.", _last_number(last))
    text = ways.TWO_SUMS.score(rng, held_out, a=a, b=b, c=c, x=x, y=y)
    return Problem("sums", text, steps, f"{a} {x} {b} {y} {c} is {last}.", _last_number(last))


def largest(rng: random.Random, held_out: HeldOut) -> Problem:
    """Three numbers, of which one is the largest."""
    while True:
        a, b, c = rng.sample(range(100), 3)
        winner = max(a, b)
        is_free = not keeps_comparison(a, b) and not keeps_comparison(winner, c)
        if is_free and is_kept(f"{a}, {b}, {c}") == (held_out == "pair"):
            break
    steps = [f"{winner} is larger than {min(a, b)}."]
    steps.append(f"{max(winner, c)} is larger than {min(winner, c)}.")
    text = ways.LARGEST.score(rng, held_out, a=a, b=b, c=c)
    answer = f"The largest is {max(a, b, c)}."
    return Problem("comparisons", text, steps, answer, has(f"largest is {max(a, b, c)}", f"{max(a, b, c)} is"))


def capital(rng: random.Random, held_out: HeldOut) -> Problem:
    """A capital, recalled by way of what the place is."""
    place = _place(rng)
    text = ways.CAPITAL.score(rng, held_out, name=place.name)
    steps = [f"The user asks for the capital of {place.name}.", f"{sentence(place.name)} is {place.kind}."]
    steps.append(f"Its capital is {place.capital}.")
    answer = f"The capital of {place.name} is {place.capital}."
    return Problem("capitals", text, steps[rng.randint(0, 1) :], answer, has(place.capital, *place.accepted))


def same_continent(rng: random.Random, held_out: HeldOut) -> Problem:
    """Two places, on one continent or not."""
    while True:
        one, other = _place(rng), _place(rng)
        if rng.random() < 0.5:
            other = rng.choice([place for place in _PLACES if place.continent == one.continent])
        pair = " and ".join(sorted((one.name, other.name)))
        if one != other and is_kept(pair) == (held_out == "pair"):
            break
    text = ways.SAME_CONTINENT.score(rng, held_out, name=one.name, other=other.name)
    text = sentence(text)
    steps = [f"{sentence(place.name)} is in {place.continent}." for place in (one, other)]
    if one.continent == other.continent:
        answer, right = f"Yes, both are in {one.continent}.", "yes"
    else:
        told = f"{one.name} is in {one.continent} and {other.name} is in {other.continent}"
        answer, right = f"No, {told}.", "no"
    return Problem("continents", text, steps, answer, has(right))


def letters(rng: random.Random, held_out: HeldOut) -> Problem:
    """A word, spelled and counted."""
    while True:
        word = coined(rng) if held_out == "nothing" and rng.random() < 0.5 else rng.choice(WORDS)
        if is_kept(f"letters of {word}") == (held_out == "pair"):
            break
    counted = ", ".join(f"{letter} {number}" for number, letter in enumerate(word, 1))
    text = ways.LETTERS.score(rng, held_out, word=word)
    answer = f"The word {word} has {len(word)} letters."
    return Problem("words", text, [f"I spell it: {counted}.", f"That is {len(word)}."], answer, _last_number(len(word)))


def about_quire(rng: random.Random, held_out: HeldOut) -> Problem:
    """A question about Quire, thought about by what it is about."""
    subject = rng.choice([one for one in quire.SUBJECTS if one.kind != "ask"])
    name = subject.names[0]
    text = quire.ask(subject, rng)
    about = {"howto": f"how to {name}", "support": f"whether Quire has {name}", "error": f"this: {name}"}
    steps = [f"The user asks {about.get(subject.kind, f'about {name}')}."]
    if subject.extras["s"] and rng.random() < 0.6:
        steps.append(f"In short: {rng.choice(subject.extras['s'])}")
    else:
        steps.append(rng.choice(("I know this one.", "That is about Quire.", "I should answer in a sentence or two.")))
    return Problem("quire", text, steps, rng.choice(subject.answers), quire.contains(subject.keys))


PROBLEMS = {sums: 5.0, largest: 2.0, capital: 3.0, same_continent: 1.5, letters: 2.0, about_quire: 3.0}


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end: two thirds with thinking, the others to learn that there may be none."""
    base = [mixture.skill(name).dialogues(random.Random(rng.getrandbits(64))) for name in BASES]
    while True:
        draw = rng.random()
        if draw < 0.15:
            yield _with_thoughts(next(rng.choice(base)), rng)
            continue
        problems = [_problem(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        is_on = draw < 0.75
        messages = [system("You are a helpful assistant.")] * (rng.random() < 0.1)
        for problem in problems:
            is_asked = rng.random() < (0.2 if is_on else 0.5)
            text = f"{_closed(problem.text)} {ways.STEPWISE.train(rng)}" if is_asked else loosely(problem.text, rng)
            if is_on:
                messages += [user(text), assistant(problem.answer, reasoning_content="\n".join(problem.steps))]
            else:
                messages += [user(text), assistant(_in_steps(problem) if is_asked else problem.answer)]
        yield Dialogue(messages, enable_thinking=is_on)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: tags, right answers after thinking, and no thoughts where thinking is off."""
    asked = []
    for make in PROBLEMS:
        kinds: tuple[HeldOut, ...] = ("nothing", "phrasing", "pair")
        for held_out in kinds if make not in (capital, about_quire) else kinds[:2]:
            if make is about_quire and held_out == "phrasing":
                continue
            for _ in range(6):
                asked += _questions(make(rng, held_out), held_out)
    for _ in range(20):
        problem = _problem(rng)
        text = f"{_closed(problem.text)} {ways.STEPWISE.score(rng, 'phrasing')}"
        asked += _questions(Problem(problem.kind, text, problem.steps, problem.answer, problem.right), "phrasing")
    return asked


def is_well_formed(reply: Reply) -> bool:
    """Whether a reply has thoughts, then an answer, and no tag in either."""
    reasoning = (reply.reasoning or "").strip()
    clean = all(tag not in text for tag in ("<think>", "</think>") for text in (reasoning, reply.content))
    return bool(reasoning and reply.content.strip()) and clean and (not reply.raw or reply.raw.count("</think>") == 1)


def has_no_thoughts(reply: Reply) -> bool:
    """Whether a reply is an answer alone."""
    return not (reply.reasoning or "").strip() and bool(reply.content.strip()) and "think>" not in reply.content


def _questions(problem: Problem, held_out: HeldOut) -> list[Question]:
    """The same problem scored for its tags, its answer, and without thinking."""
    messages = [user(problem.text)]
    thought = with_reasoning("\n".join(problem.steps), problem.answer)
    return [
        Question("thinking tags", messages, is_well_formed, held_out, enable_thinking=True, example=thought),
        Question(f"thinking: {problem.kind}", messages, problem.right, held_out, enable_thinking=True, example=thought),
        Question("no thinking when off", messages, has_no_thoughts, held_out, example=problem.answer),
    ]


def _problem(rng: random.Random) -> Problem:
    return rng.choices(list(PROBLEMS), list(PROBLEMS.values()))[0](rng, "nothing")


def _with_thoughts(dialogue: Dialogue, rng: random.Random) -> Dialogue:
    """A dialogue of another skill with a short thought before each answer, for any question."""
    thoughts = ("This is a short question.", "I can answer this.", "I know this one.", "Let me answer that.")
    messages = [
        {**message, "reasoning_content": rng.choice(thoughts)} if message["role"] == "assistant" else message
        for message in dialogue.messages
    ]
    return Dialogue(messages, enable_thinking=True)


def _in_steps(problem: Problem) -> str:
    steps = [f"{number}. {step}" for number, step in enumerate(problem.steps, 1)]
    return "\n".join([*steps, problem.answer])


def _last_number(number: int) -> Callable[[Reply], bool]:
    return lambda reply: re.findall(r"-?\d+", reply.content)[-1:] == [str(number)]


def _closed(text: str) -> str:
    return text if text[-1] in "?.!" else text + "."


_PLACES = [place for place in places() if not place.is_its_own_capital and place.name != "Georgia"]


def _place(rng: random.Random) -> Place:
    return rng.choice(_PLACES)
