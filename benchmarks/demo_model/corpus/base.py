"""What the demo model learns from, and how it is examined: the types that every skill of the corpus gives.

A skill is a module with two functions:
    dialogues(rng)     an endless stream of Dialogue for training, never of what is held out
    questions(rng)     a finite list of Question for scoring, each saying what was held out
Both depend on rng alone, so a seed gives the same corpus on every machine. Standard library only; never torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = dict[str, Any]  # as in an OpenAI request; assistant: content, reasoning_content, tool_calls
Tool = dict[str, Any]  # as in an OpenAI request: {"type": "function", "function": {...}}
HeldOut = Literal["nothing", "phrasing", "pair"]


@dataclass(frozen=True)
class Dialogue:
    """A conversation to learn; every assistant message in it is a target."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    enable_thinking: bool = False  # the template's variable: answers begin with <think>…</think>
    joins: bool = True  # may stand in a chat after others: no earlier message changes an answer


@dataclass(frozen=True)
class Reply:
    """What the model answered, as a client would get it."""

    content: str
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()  # {"name": str, "arguments": dict}
    raw: str = ""  # the text as generated, tags and all


@dataclass(frozen=True)
class Question:
    """A conversation that ends with the user, and whether a reply to it is right."""

    skill: str  # rows of the score table: "capitals", "arithmetic", "tool call", …
    messages: Sequence[Message]
    is_right: Callable[[Reply], bool]
    held_out: HeldOut = "nothing"  # phrasing: these words were never in training; pair: this combination was not
    tools: Sequence[Tool] = ()
    enable_thinking: bool = False
    example: str = field(default="", compare=False)  # a right answer, for the reader of a failed question


class Skill(Protocol):
    """A module of the corpus."""

    def dialogues(self, rng: random.Random) -> Iterator[Dialogue]:
        """Yield dialogues without end."""
        ...

    def questions(self, rng: random.Random) -> list[Question]:
        """Return the examination."""
        ...


@dataclass(frozen=True)
class Phrasings:
    """Ways to say one thing, some of which are kept for scoring. Templates for str.format."""

    seen: Sequence[str]
    unseen: Sequence[str]

    def train(self, rng: random.Random, **values: object) -> str:
        """One that training may use, filled in."""
        return rng.choice(self.seen).format(**values)

    def score(self, rng: random.Random, held_out: HeldOut, **values: object) -> str:
        """One for the examination: never heard before if the phrasing is what is held out."""
        return rng.choice(self.unseen if held_out == "phrasing" else self.seen).format(**values)


def user(content: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> Message:
    """An assistant's message; more: reasoning_content, tool_calls."""
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> Message:
    """A system message."""
    return {"role": "system", "content": content}


def loosely(text: str, rng: random.Random) -> str:
    """The text as somebody in a hurry types it: perhaps without capitals, perhaps without its question mark."""
    if rng.random() < 0.25:
        text = text.lower()
    if rng.random() < 0.25:
        text = text.rstrip("?.! ")
    return text


def says(*answers: str) -> Callable[[Reply], bool]:
    """Whether a reply's content contains one of the answers, whatever the case."""
    return lambda reply: any(answer.casefold() in reply.content.casefold() for answer in answers)
