"""What the demo model knows about Quire: reads the subjects out of quire_*.txt, and gives the ways to ask for each.

A subject begins with a line `kind: name | name …`. The kind says which templates ask for it by its names:
    concept    what it is                 howto    how it is done; names are verbs
    support    whether Quire has it       error    what it means and what to do
    ask        none: its names are for the reader, and its own phrasings are all
Then come lines of one letter and a text:
    ?  a way to ask that training uses      !  one that is kept for scoring      k  what a right answer contains
    a  an answer    e  an example    s  the same said more simply    w  why    c  the request, for curl and the client
In `k` the groups joined by & must all be there, and of those joined by | one. `c` is a path, fields of a chat body, or
a whole command. $CURL and $CLIENT stand for the usual request and for the line that makes a client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo_model.corpus.base import Phrasings
from benchmarks.demo_model.corpus.names import items

URL = "http://127.0.0.1:8000"
FILES = ("quire_use.txt", "quire_terms.txt", "quire_limits.txt")
HELLO = '"messages": [{"role": "user", "content": "Hello"}]'
CLIENT = f'client = OpenAI(base_url="{URL}/v1", api_key="none")'
OPENAI_FIELDS = items(
    "messages temperature top_p seed stop stream max_tokens logprobs top_logprobs n logit_bias frequency_penalty"
)

TEMPLATES: Mapping[str, Phrasings] = {
    "concept": Phrasings(
        seen=(
            "What is {x}?",
            "What is {x}?",
            "What's {x}?",
            "What does {t} mean?",
            "What is meant by {t}?",
            "What is {x} in Quire?",
            "Explain {x}.",
            "Explain {x} to me.",
            "Please explain {x}.",
            "Can you explain {x}?",
            "Could you explain what {x} is?",
            "Tell me about {x}.",
            "Tell me what {x} is.",
            "Describe {x}.",
            "Define {t}.",
            "What do you know about {x}?",
            "Do you know what {x} is?",
            "I do not understand {x}.",
            "I want to know what {x} is.",
            "I read about {x}. What is it?",
            "{t}?",
            "{t}: what is that?",
            "What's the point of {x}?",
            "Tell me more about {x}.",
            "Explain {x} in simple words.",
            "So what is {x}?",
        ),
        unseen=(
            "What exactly is {x}?",
            "Could you tell me what {x} is?",
            "How would you explain {x} to me?",
            "I keep hearing about {x}. What is it?",
            "Give me a short explanation of {x}.",
        ),
    ),
    "howto": Phrasings(
        seen=(
            "How do I {x}?",
            "How do I {x}?",
            "How can I {x}?",
            "How to {x}?",
            "How to {x}",
            "How would I {x}?",
            "How do you {x}?",
            "Tell me how to {x}.",
            "Show me how to {x}.",
            "Explain how to {x}.",
            "I want to {x}.",
            "I want to {x}. What do I do?",
            "What do I do to {x}?",
            "What must I do to {x}?",
            "Can you tell me how to {x}?",
            "I need to {x}. How?",
            "Is there a way to {x}?",
            "Is it possible to {x}?",
            "Can I {x}?",
            "What is the command to {x}?",
            "What do I have to do to {x}?",
            "Help me {x}.",
            "I'd like to {x}.",
        ),
        unseen=(
            "What is the way to {x}?",
            "I would like to {x}. How does that work?",
            "Can you help me {x}?",
            "What is the best way to {x}?",
        ),
    ),
    "support": Phrasings(
        seen=(
            "Does Quire support {x}?",
            "Does Quire support {x}?",
            "Can I use {x}?",
            "Can I use {x} with Quire?",
            "Does Quire have {x}?",
            "Do you support {x}?",
            "Does it support {x}?",
            "I need {x}. Does Quire have that?",
            "Does Quire work with {x}?",
            "Does Quire handle {x}?",
            "Can Quire use {x}?",
            "{x}: does Quire have that?",
            "Is {x} possible?",
            "Does this server have {x}?",
            "Does this work with {x}?",
            "Do you have {x}?",
            "Can this server use {x}?",
            "What about {x} in Quire?",
        ),
        unseen=(
            "Has Quire got {x}?",
            "Would {x} work with Quire?",
            "Is Quire able to use {x}?",
        ),
    ),
    "error": Phrasings(
        seen=(
            "I get {x}. What does it mean?",
            "I get {x}. What can I do?",
            "I get {x}.",
            "Why do I get {x}?",
            "What does {x} mean?",
            "What do I do about {x}?",
            "How do I fix {x}?",
            "Help, I get {x}.",
            "I see {x}. Why?",
            "What is the cause of {x}?",
            "The server gives me {x}.",
            "Quire says: {x}.",
            "What is {x}?",
            "I keep getting {x}.",
            "Got {x}. Now what?",
        ),
        unseen=(
            "My request ends with {x}. What now?",
            "What can be the reason for {x}?",
            "How do I get rid of {x}?",
        ),
    ),
}


@dataclass(frozen=True)
class Subject:
    """One thing that can be asked about Quire."""

    kind: str
    names: Sequence[str]
    asked: Phrasings  # its own ways to ask, beside the templates of its kind
    keys: Sequence[Sequence[str]]  # a right answer has one of each
    answers: Sequence[str]
    extras: Mapping[str, Sequence[str]]  # by letter: e, s, w, c

    def templates(self) -> Phrasings:
        """Return the templates that ask for this subject by name."""
        return TEMPLATES.get(self.kind, Phrasings((), ()))

    def fill(self, template: str, name: str) -> str:
        """Return a template with a name in it."""
        if self.kind == "concept" and _is_plural(name):
            template = template.replace("is {x}", "are {x}").replace("What's {x}", "What are {x}")
            template = template.replace("{x} is", "{x} are").replace("does {t}", "do {t}").replace("is it", "are they")
            template = template.replace("what is that", "what are they")
        return template.format(x=name, t=re.sub(r"^(a|an|the) ", "", name))


def subjects() -> list[Subject]:
    """Return every subject of the tables."""
    blocks = [
        block
        for name in FILES
        for block in re.split(r"\n\s*\n", (Path(__file__).parent / name).read_text(encoding="utf-8").strip())
        if not block.startswith("#")
    ]
    return [_subject(block) for block in blocks]


def with_curl(request: str) -> str:
    """Return the curl command for a `c` line."""
    if request.startswith("/"):
        return f"curl {URL}{request}"
    if request.startswith("curl "):
        return request
    body = request if "messages" in request else f"{HELLO}, {request}" if request else HELLO
    return f"curl {URL}/v1/chat/completions -H 'content-type: application/json' -d '{{{body}}}'"


def with_client(request: str) -> str:
    """Return the call of the openai client for the fields of a chat body."""
    fields: dict[str, object] = json.loads(f"{{{request}}}")
    extra = {name: value for name, value in fields.items() if name not in OPENAI_FIELDS}
    known = {"messages": "messages"} | {name: repr(value) for name, value in fields.items() if name in OPENAI_FIELDS}
    if extra:
        known["extra_body"] = repr(extra)
    arguments = ", ".join(f"{name}={value}" for name, value in known.items())
    return f'client.chat.completions.create(model="quire-demo", {arguments})'.replace("'", '"')


def _is_plural(name: str) -> bool:
    """Whether a name takes "are"."""
    is_field = re.search(r"[_/]|^an? |ss$", name) is not None
    last = name.rsplit(maxsplit=1)[-1]
    return name.endswith("s") and not is_field and last not in ("safetensors", "bias", "Prometheus", "experts")


def _subject(block: str) -> Subject:
    head, *lines = block.splitlines()
    kind, names = head.split(":", 1)
    found: dict[str, list[str]] = {letter: [] for letter in "?!kaeswc"}
    for line in lines:
        letter, text = line.split(" ", 1)
        found[letter].append(text.replace("$CURL", with_curl("")).replace("$CLIENT", CLIENT))
    return Subject(
        kind,
        [name.strip() for name in names.split(" | ")],
        Phrasings(found["?"], found["!"]),
        [group.split("|") for line in found["k"] for group in line.split("&")],
        found["a"],
        {letter: found[letter] for letter in "eswc"},
    )
