"""Tools that nobody has: made of a verb, a noun and one to three fields, so that names are read and not remembered."""

from __future__ import annotations

import json
import random
from typing import Any

from benchmarks.demo_model.corpus import names
from benchmarks.demo_model.corpus.base import HeldOut, Phrasings
from benchmarks.demo_model.corpus.names import COLOURS, DAYS, items
from benchmarks.demo_model.corpus.tool_jobs import Job, any_name, is_kept_name, make_tool, text_field
from benchmarks.demo_model.corpus.topics import is_kept, sentence, with_article

VERBS = {  # and what was done afterwards
    "create": "created", "delete": "deleted", "find": "found", "open": "open", "close": "closed", "add": "added",
    "remove": "removed", "update": "updated", "book": "booked", "order": "ordered", "start": "started",
    "stop": "stopped", "print": "printed", "rename": "renamed", "copy": "copied", "move": "moved", "check": "checked",
    "save": "saved", "share": "shared", "paint": "painted",
}  # fmt: skip
NOUNS = items("""note alarm task file table room ticket list photo song door lamp invoice report recipe contact message
meeting folder playlist window robot parcel card poster""")
WORD_FIELDS = items("title name label topic tag code")
NUMBER_FIELDS = items("count size number amount minutes level")
PERSON_FIELDS = items("owner user guest author")
CHOICE_FIELDS = {"color": COLOURS, "day": DAYS, "priority": ["low", "medium", "high"], "mode": ["fast", "slow", "auto"]}
REASONS = ("no space left", "not allowed", "not found", "the service is down", "invalid value", "timeout")
SAID = Phrasings(
    ("{Verb} {article} with {fields}.", "Please {verb} {article} with {fields}.", "{Verb} the {noun} with {fields}.",
     "I want to {verb} {article} with {fields}.", "Can you {verb} {article} with {fields}?",
     "{Verb} {article}: {fields}.",
     "{Verb} {article}, {fields}.", "Would you {verb} {article} with {fields}?",
     "Help me {verb} {article} with {fields}.", "I would like to {verb} {article}: {fields}.",
     "{Verb} {article}. Use {fields}.",
     "Can you {verb} the {noun}: {fields}?", "I need you to {verb} the {noun} with {fields}."),
    ("Could you {verb} {article} with {fields}?", "{Verb} {article} for me: {fields}.",
     "Let us {verb} {article} with {fields}."),
)  # fmt: skip


def made_up(rng: random.Random, held_out: HeldOut) -> Job:
    """Return a job for a made-up tool."""
    while True:
        verb, noun = rng.choice(list(VERBS)), rng.choice(NOUNS)
        if held_out == "nothing" and rng.random() < 0.5:
            noun = names.coined(rng)
        if is_kept(f"{verb}_{noun}") == (held_out == "pair") and (
            held_out == "pair" or not is_kept_name(f"{verb}_{noun}")
        ):
            break
    properties: dict[str, dict[str, Any]] = {}
    arguments: dict[str, Any] = {}
    count = rng.choice((1, 1, 2, 2, 3))
    while len(properties) < count:
        field, schema, value = _field(rng, held_out)
        if field not in properties:
            properties[field], arguments[field] = schema, value
    fields = _spoken(arguments, rng)
    text = SAID.score(
        rng, held_out, verb=verb, Verb=sentence(verb), noun=noun, article=with_article(noun), fields=fields
    )
    required = list(properties)
    if rng.random() < 0.25:  # a field that the user does not speak of is left out
        field, schema, _ = _field(rng, held_out)
        if field not in properties:
            properties[field] = schema
    is_named_freely = held_out == "nothing" and rng.random() < 0.2
    name = any_name(rng, (verb, noun)) if is_named_freely else _joined(verb, noun, rng)
    tool = make_tool(name, f"{sentence(verb)} {with_article(noun)}.", properties, required)
    if rng.random() < 0.3:
        number = rng.randint(1, 99)
        answer = f"Done: the {noun} is {VERBS[verb]}. Its id is {number}."
        return Job(tool, text, arguments, json.dumps({"id": number}), answer, (noun, str(number)))
    shown = rng.choice((json.dumps({"status": "ok"}), json.dumps({"ok": True}), "ok", "done"))
    return Job(tool, text, arguments, shown, f"Done: the {noun} is {VERBS[verb]}.", (noun,))


def _field(rng: random.Random, held_out: HeldOut) -> tuple[str, dict[str, Any], Any]:
    kind = rng.choice(("word", "word", "number", "number", "person", "choice"))
    if kind == "word":
        field = names.coined(rng) if held_out == "nothing" and rng.random() < 0.3 else rng.choice(WORD_FIELDS)
        return field, text_field(), names.word(rng, held_out)
    if kind == "number":
        field = names.coined(rng) if held_out == "nothing" and rng.random() < 0.3 else rng.choice(NUMBER_FIELDS)
        return field, {"type": "integer"}, rng.randint(1, 99)
    if kind == "person":
        field = names.coined(rng) if held_out == "nothing" and rng.random() < 0.3 else rng.choice(PERSON_FIELDS)
        return field, text_field(), names.person(rng, held_out)
    field = rng.choice(list(CHOICE_FIELDS))
    return field, {"type": "string", "enum": CHOICE_FIELDS[field]}, rng.choice(CHOICE_FIELDS[field])


def _spoken(arguments: dict[str, Any], rng: random.Random) -> str:
    form = rng.choice(("{} {}", "{} {}", "the {} {}", "{} = {}", "{}: {}"))
    parts = [form.format(field, value) for field, value in arguments.items()]
    rng.shuffle(parts)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _joined(verb: str, noun: str, rng: random.Random) -> str:
    return rng.choice(
        (f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{sentence(noun)}", f"{noun}_{verb}", f"{verb}-{noun}")
    )
