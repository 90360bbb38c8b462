"""The whole corpus: every skill with its share, one endless stream of their dialogues, and the whole examination."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator

from benchmarks.demo_model.corpus.base import Dialogue, Question, Skill
from benchmarks.demo_model.corpus.first_questions import is_held_out

SKILLS = {  # name of the module → its share of the dialogues
    "geography": 13.0,
    "arithmetic": 17.0,
    "words": 9.0,
    "smalltalk": 8.0,
    "stories": 4.0,
    "quire": 20.0,
    "styles": 9.0,
    "thinking": 7.0,
    "tools": 12.0,
    "json_output": 9.0,
    "languages": 3.0,
    "unknown": 11.0,
    "requests": 5.0,
    "lists": 5.0,
    "introductions": 5.0,
}


def skill(name: str) -> Skill:
    """Return the module of a skill. Imported now: some skills are made over the dialogues of others."""
    return importlib.import_module(f"benchmarks.demo_model.corpus.{name}")


def stream(seed: int) -> Iterator[Dialogue]:
    """Yield dialogues of all skills, each as often as its share says, without end.

    None has a message of the first questions, which are kept for scoring.
    """
    rng = random.Random(f"{seed}: mixture")
    streams = [skill(name).dialogues(random.Random(f"{seed}: {name}")) for name in SKILLS]
    shares = list(SKILLS.values())
    while True:
        dialogue = next(rng.choices(streams, shares)[0])
        if not any(message["role"] == "user" and is_held_out(message["content"]) for message in dialogue.messages):
            yield dialogue


def examination(seed: int) -> list[Question]:
    """Return the questions of all skills."""
    return [
        question for name in SKILLS for question in skill(name).questions(random.Random(f"{seed}: {name} questions"))
    ]
