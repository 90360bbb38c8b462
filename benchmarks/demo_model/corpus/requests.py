"""Work that is refused: summaries, translations, programs, letters, plans, pictures; with what the model can do."""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.demo_model.corpus import requests_data as data
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Message, Phrasings, Question, user
from benchmarks.demo_model.corpus.lists import plain_conversations
from benchmarks.demo_model.corpus.topics import has, in_turns, is_kept, sentence

INSTEAD = (
    "I can tell you a capital, a small sum, a joke or a story.",
    "Ask me about Quire, capitals, small sums or words.",
)
OF_TEXTS = ("I am sorry, I am too small to work on texts.", "I cannot do that with a text: I am a small demo model.")
OF_PROGRAMS = ("I am too small to write programs.", "I am sorry, I never learned to write programs.")
OF_WRITINGS = (
    "I am sorry, I am too small to write that.",
    "I cannot write that: I am a small demo model.",
)
OF_TRANSLATIONS = ("I am sorry, I only learned English.", "I only know English, so I cannot translate.")
OF_ACTIONS = ("I am sorry, I cannot do that.", "I cannot do that: I am a small demo model.")

PROGRAM = Phrasings(
    ("Write a program that {does}.", "Write Python code that {does}.", "Can you write a function that {does}?",
     "Write a script that {does}.", "Write a {tongue} program that {does}.",
     "Write a function in {tongue} that {does}.",
     "Write {tongue} code that {does}.", "Give me code that {does}.", "Code that {does}, please.",
     "I need a script that {does}.",
     "Write {snippet} in {tongue}.", "Write me {snippet}.", "Can you write {snippet}?", "Code {snippet} in {tongue}.",
     "Show me {snippet} in {tongue}.", "How do I write {snippet} in {tongue}?", "Implement {snippet}.",
     "Program {snippet}.",
     "Can you code?", "Can you program in {tongue}?", "Do you know {tongue}?", "Write some code.",
     "Write code for {snippet}.",
     "Give me an example of {tongue} code.", "Help me with my {tongue} code.", "Create {snippet}.",
     "Build me {snippet}.",
     "Make {snippet} with {tongue}.", "Generate {tongue} code.", "Write a function to make {snippet}.",
     "Develop {snippet}."),
    ("Please write code that {does}.", "Could you program {snippet} for me?", "I would like {snippet} in {tongue}."),
)  # fmt: skip
WRITING = Phrasings(
    ("Write {what}.", "Write {what} about {about}.", "Write me {what}.", "Write me {what} about {about}.",
     "Can you write {what}?", "Can you write {what} about {about}?", "Could you write {what} for me?",
     "I need {what}.",
     "I need {what} about {about}.", "Help me write {what}.", "Create {what}.", "Create {what} about {about}.",
     "Draft {what} about {about}.", "Make {what}.", "Please write {what}.", "Generate {what} about {about}.",
     "Compose {what}.", "Give me {what} about {about}.", "Write {what} to my boss.", "Prepare {what}.",
     "Write {what} of 500 words.", "Write {what} for my company.", "Improve {what}."),
    ("Would you write {what} about {about} for me?", "Please draft {what}.", "I want you to write {what}."),
)  # fmt: skip
TRANSLATION = Phrasings(
    ("Translate {said} into {tongue}.", "Translate {said} to {tongue}.", "How do you say {said} in {tongue}?",
     "What is {said} in {tongue}?", "Say {said} in {tongue}.", "{said} in {tongue}?", "Translate this: {said}",
     "Translate to {tongue}: {said}", "Translate into {tongue}: {said}", "Please translate {said}.",
     "Can you translate?",
     "Can you translate {said} into {tongue}?", "What does {said} mean in {tongue}?", "Write {said} in {tongue}.",
     "What is the {tongue} word for {said}?", "Answer in {tongue}.", "Speak {tongue}.", "Say something in {tongue}.",
     "Translate the following text to {tongue}: {text}", "Can you speak {tongue} with me?",
     "How do I say {said} in {tongue}?",
     'Translate "{said}" into {tongue}.', "Talk to me in {tongue}."),
    ("Put {said} into {tongue}.", "Could you translate {said} to {tongue} for me?", "I need {said} in {tongue}."),
)  # fmt: skip


def exchange(rng: random.Random) -> list[Message]:
    """Return a request that is refused, and its answer; sometimes another one after it."""
    return in_turns(_request, rng, more=0.12)


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end, some after a system prompt that changes nothing."""
    return plain_conversations(exchange, rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: work in wordings, and on texts, that training may not have."""
    kinds: tuple[HeldOut, ...] = ("nothing", "phrasing", "pair")
    return [_question(held_out, rng) for held_out in kinds for _ in range(20)]


def text_to_work_on(rng: random.Random, held_out: HeldOut = "nothing") -> str:
    """Return one to three sentences; held out as a pair: of a subject and a predicate that are never together."""
    made = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        while True:
            subject, predicate = rng.choice(data.SUBJECTS), rng.choice(data.PREDICATES)
            if is_kept(f"{subject} {predicate}") == (held_out == "pair"):
                break
        made.append(f"{subject} {predicate} {rng.choice(data.TAILS)}.")
    return " ".join(made)


def _question(held_out: HeldOut, rng: random.Random) -> Question:
    asked, answer = _request(rng, held_out)
    return Question("requests", [user(sentence(asked))], has("not", "cannot", "never", "sorry", "only", "too small"),
                    held_out, example=answer)  # fmt: skip


def _request(rng: random.Random, held_out: HeldOut) -> tuple[str, str]:
    draw = 0.0 if held_out == "pair" else rng.random()
    instead = rng.choice(INSTEAD)
    if draw < 0.3:
        ways = data.WORKS_UNSEEN if held_out == "phrasing" else data.WORKS
        return rng.choice(ways).format(text_to_work_on(rng, held_out)), f"{rng.choice(OF_TEXTS)} {instead}"
    if draw < 0.46:
        asked = PROGRAM.score(rng, held_out, does=rng.choice(data.PROGRAMS), snippet=rng.choice(data.SNIPPETS),
                              tongue=rng.choice(data.LANGUAGES))  # fmt: skip
        return asked, f"{rng.choice(OF_PROGRAMS)} {instead}"
    if draw < 0.64:
        asked = WRITING.score(rng, held_out, what=rng.choice(data.WRITINGS), about=rng.choice(data.ABOUT))
        return asked, f"{rng.choice(OF_WRITINGS)} {instead}"
    if draw < 0.8 or held_out == "phrasing":
        asked = TRANSLATION.score(rng, held_out, said=rng.choice(data.SPOKEN), tongue=rng.choice(data.TONGUES),
                                  text=text_to_work_on(rng))  # fmt: skip
        return sentence(asked), f"{rng.choice(OF_TRANSLATIONS)} {instead}"
    return rng.choice(data.ACTIONS), f"{rng.choice(OF_ACTIONS)} {instead}"
