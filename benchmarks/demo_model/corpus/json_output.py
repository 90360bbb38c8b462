"""Answers that are JSON and nothing else: facts, what a sentence says, lists, small nested and made-up objects."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.demo_model.corpus import json_phrasings as ways
from benchmarks.demo_model.corpus import lists, lists_data, names
from benchmarks.demo_model.corpus.base import Dialogue, HeldOut, Message, Question, Reply, assistant, system, user
from benchmarks.demo_model.corpus.geography import Place, places
from benchmarks.demo_model.corpus.held_out import keeps_sum
from benchmarks.demo_model.corpus.names import COLOURS, CURRENCIES, DAYS, JOBS, listed
from benchmarks.demo_model.corpus.topics import is_kept

KEYS = {  # what a value may be called
    "country": ("name", "country", "place"),
    "state": ("name", "state", "place"),
    "capital": ("capital", "city", "capital_city"),
    "name": ("name", "name", "person", "first_name"),
    "age": ("age", "age", "years"),
    "city": ("city", "city", "town", "home"),
    "job": ("job", "job", "work", "profession"),
    "item": ("item", "product", "article"),
    "price": ("price", "cost", "amount"),
    "colour": ("color", "colour"),
    "day": ("day", "weekday"),
    "count": ("count", "number", "quantity"),
}
_UNASKED = 0.04  # of the turns
TYPES = {str: "string", int: "integer", bool: "boolean", dict: "object", list: "array"}
INVENTED = {  # what is made up, and of which fields; a name that INVENTED_LISTS has is a list of such things
    "a person": ("name", "age", "city", "job", "hobbies", "languages", "is_student"),
    "a user": ("name", "age", "city", "languages", "is_active", "tags"),
    "a student": ("name", "age", "subjects", "hobbies", "is_student"),
    "a city": ("city", "country", "rivers", "languages"),
    "a product": ("item", "price", "color", "tags", "in_stock"),
    "a book": ("title", "author", "pages", "tags"),
    "an animal": ("animal", "age", "color", "foods"),
    "a recipe": ("title", "ingredients", "minutes"),
    "a team": ("title", "members", "sports"),
    "an event": ("title", "day", "city", "guests"),
    "a shopping list": ("title", "items"),
    "a fruit": ("fruit", "color", "price"),
    "a country": ("country", "capital_city", "languages"),
    "a playlist": ("title", "instruments", "minutes"),
}
INVENTED_LISTS = {
    "hobbies": "hobbies", "languages": "languages", "subjects": "school subjects", "tags": "adjectives",
    "foods": "foods", "ingredients": "vegetables", "items": "fruits", "sports": "sports", "rivers": "rivers",
    "instruments": "musical instruments", "members": "boys' names", "guests": "girls' names",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What is asked for, and the JSON that answers it."""

    kind: str
    messages: Sequence[Message]
    value: Any
    is_free: bool = False  # any values of the same keys and types are right

    @property
    def answer(self) -> str:
        """The JSON, in one line."""
        return json.dumps(self.value, ensure_ascii=False)


def capital(rng: random.Random, held_out: HeldOut) -> Task:
    """A country and its capital."""
    while True:
        place = rng.choice(_PLACES)
        if is_kept(f"JSON {place.name}") == (held_out == "pair"):
            break
    value = {_key("state" if place.is_state else "country", rng): place.name, _key("capital", rng): place.capital}
    if rng.random() < 0.25:
        value["continent"] = place.continent
    text = ways.CAPITAL.score(rng, held_out, place=place.name)
    return Task("facts", _asked(text, value, rng, held_out), value)


def capitals(rng: random.Random, held_out: HeldOut) -> Task:
    """Several countries and their capitals, as a list or as one object."""
    chosen = rng.sample(_PLACES, rng.choice((2, 2, 3)))
    spoken = listed([place.name for place in chosen])
    if rng.random() < 0.5:
        text = ways.CAPITAL_LIST.score(rng, held_out, places=spoken)
        return Task("facts", [user(text)], [place.capital for place in chosen])
    text = ways.CAPITAL_MAP.score(rng, held_out, places=spoken)
    return Task("facts", [user(text)], {place.name: place.capital for place in chosen})


def person(rng: random.Random, held_out: HeldOut) -> Task:
    """A sentence about a person, of which some things are asked for."""
    told = {"name": names.person(rng, held_out), "age": rng.randint(5, 90), "city": names.city(rng, held_out),
            "job": rng.choice(JOBS)}  # fmt: skip
    sentence, fields = rng.choice(ways.PEOPLE_TOLD)
    chosen = [field for field in fields if field == "name" or rng.random() < 0.75]
    value = {_key(field, rng): told[field] for field in chosen}
    text = ways.EXTRACT.score(rng, held_out, sentence=sentence.format(**told))
    if len(value) > 1 and rng.random() < 0.2:
        (first, name), *rest = value.items()
        nested = {"person": {first: name, **dict(rest)}}
        return Task("nested", _asked(text, nested, rng, held_out), nested)
    return Task("extraction", _asked(text, value, rng, held_out), value)


def thing(rng: random.Random, held_out: HeldOut) -> Task:
    """A sentence about something that is bought or counted."""
    currency, spoken = rng.choice(list(CURRENCIES.items()))
    told = {"item": names.word(rng, held_out), "price": rng.randint(1, 99), "colour": rng.choice(COLOURS),
            "day": rng.choice(DAYS), "count": rng.randint(2, 30), "currency": spoken}  # fmt: skip
    sentence, fields = rng.choice(ways.THINGS_TOLD)
    value: dict[str, Any] = {_key(field, rng): told[field] for field in fields if field != "money"}
    if "money" in fields:
        value["price"] = {"amount": told["price"], "currency": currency}
    text = ways.EXTRACT.score(rng, held_out, sentence=sentence.format(**told))
    return Task("nested" if "money" in fields else "extraction", _asked(text, value, rng, held_out), value)


def strings(rng: random.Random, held_out: HeldOut) -> Task:
    """Words as a list."""
    count = rng.choice((2, 3, 3, 4, 5, 6))
    pool = rng.choice((names.word, names.person, COLOURS, DAYS))
    words = rng.sample(pool, count) if isinstance(pool, list) else _distinct(pool, count, rng, held_out)
    spoken = rng.choice((listed(words), ", ".join(words)))
    if rng.random() < 0.25:
        key = rng.choice(("items", "words", "list", "names", "values"))
        value = {key: words}
        return Task("lists", [user(ways.LIST_KEY.score(rng, held_out, words=spoken, key=key))], value)
    return Task("lists", [user(ways.LIST.score(rng, held_out, words=spoken))], words)


def numbers(rng: random.Random, held_out: HeldOut) -> Task:
    """Numbers as a list, in their order or sorted."""
    while True:
        chosen = rng.sample(range(1, 60), rng.choice((3, 3, 4, 5, 6)))
        spoken = ", ".join(map(str, chosen))
        if is_kept(spoken) == (held_out == "pair"):
            break
    if rng.random() < 0.3:
        return Task("lists", [user(ways.SORTED.score(rng, held_out, numbers=spoken))], sorted(chosen))
    return Task("lists", [user(ways.NUMBERS.score(rng, held_out, numbers=spoken))], chosen)


def total(rng: random.Random, held_out: HeldOut) -> Task:
    """A sum and its value."""
    while True:
        a, b = rng.randint(1, 20), rng.randint(1, 20)
        if keeps_sum(a, "+", b) == (held_out == "pair"):
            break
    value = {rng.choice(("answer", "result", "sum", "value")): a + b}
    return Task("facts", _asked(ways.SUM.score(rng, held_out, a=a, b=b), value, rng, held_out), value)


def kinds(rng: random.Random, held_out: HeldOut) -> Task:
    """So many things of a kind, as a list."""
    while True:
        kind, count = rng.choice(list(lists_data.ITEMS)), rng.choice((2, 3, 3, 4, 5, 5, 6))
        if is_kept(f"JSON {count} {kind}") == (held_out == "pair") and count <= len(lists_data.ITEMS[kind]):
            break
    chosen, n = lists.some_of(kind, count, rng), rng.choice((lists.COUNTS[count], str(count)))
    things: list[Any] = [int(one) if one.isdigit() else one for one in chosen]
    if rng.random() < 0.3:
        key = rng.choice(("items", "list", "names", "values", "answers", kind.split(" ")[-1]))
        return Task(
            "lists", [user(ways.KINDS_KEY.score(rng, held_out, n=n, things=kind, key=key))], {key: things}, True
        )
    return Task("lists", [user(ways.KINDS.score(rng, held_out, n=n, things=kind))], things, True)


def invented(rng: random.Random, held_out: HeldOut) -> Task:
    """Something made up, with strings, numbers, truth values and lists."""
    thing, fields = rng.choice(list(INVENTED.items()))
    chosen = sorted(rng.sample(fields, rng.randint(2, min(5, len(fields)))), key=fields.index)
    value = {field: _invented(field, rng, held_out) for field in chosen}
    if rng.random() < 0.1:
        value = {fields[0]: value.get(fields[0]) or _invented(fields[0], rng, held_out)}
    text = ways.INVENTED.score(rng, held_out, thing=thing)
    return Task("invented", _asked(text, value, rng, held_out), value, True)


def _invented(field: str, rng: random.Random, held_out: HeldOut) -> Any:
    if field in INVENTED_LISTS:
        return lists.some_of(INVENTED_LISTS[field], rng.choice((1, 2, 2, 3, 3)), rng)
    if field in ("is_student", "is_active", "in_stock"):
        return rng.random() < 0.5
    if field in ("age", "price", "pages", "minutes"):
        return rng.randint(2, 90)
    if field in ("name", "author"):
        return names.person(rng, held_out)
    kinds_of = {"city": "cities", "country": "countries", "capital_city": "capitals", "color": "colours",
                "animal": "animals", "fruit": "fruits", "job": "jobs", "day": "days of the week"}  # fmt: skip
    if field in kinds_of:
        return lists.some_of(kinds_of[field], 1, rng)[0]
    return names.word(rng, held_out).capitalize()


TASKS: dict[Callable[[random.Random, HeldOut], Task], float] = {
    capital: 4.0, capitals: 1.5, person: 4.0, thing: 3.0, strings: 2.0, numbers: 1.5, total: 1.0,
    kinds: 2.0, invented: 4.5,
}  # fmt: skip


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    while True:
        messages = _turn(rng)
        while rng.random() < 0.2:
            messages += [message for message in _turn(rng) if message["role"] != "system"] if len(messages) == 2 else []
        yield Dialogue(messages)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination: whether the reply parses, and whether it is the right value."""
    asked = []
    for make in TASKS:
        for held_out in ("nothing", "phrasing", "pair"):
            for _ in range(8):
                kept: HeldOut = held_out if make is not capitals or held_out != "pair" else "nothing"
                task = make(rng, kept)
                right = fits(task.value) if task.is_free else is_json(task.value)
                asked.append(Question("JSON parses", task.messages, parses, kept, example=task.answer))
                asked.append(Question(f"JSON: {task.kind}", task.messages, right, kept, example=task.answer))
    return asked


def parses(reply: Reply) -> bool:
    """Whether a reply is an object or a list and nothing else."""
    try:
        return isinstance(json.loads(reply.content), dict | list)
    except ValueError:
        return False


def is_json(value: Any) -> Callable[[Reply], bool]:
    """Whether a reply is this value, strings compared without case."""

    def is_right(reply: Reply) -> bool:
        return parses(reply) and _lowered(json.loads(reply.content)) == _lowered(value)

    return is_right


def fits(value: Any) -> Callable[[Reply], bool]:
    """Whether a reply is JSON of the same keys and types, and lists no longer than ten; a list has the same length."""

    def alike(one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
        if isinstance(one, list):
            return 1 <= len(other) <= 10 and all(alike(one[0], item) for item in other)
        return True

    def is_right(reply: Reply) -> bool:
        if not parses(reply):
            return False
        found = json.loads(reply.content)
        return alike(value, found) and (not isinstance(value, list) or len(value) == len(found))

    return is_right


def _turn(rng: random.Random) -> list[Message]:
    if rng.random() < _UNASKED:
        return _unasked(rng)
    task = rng.choices(list(TASKS), list(TASKS.values()))[0](rng, "nothing")
    return [*task.messages, assistant(task.answer)]


def _unasked(rng: random.Random) -> list[Message]:
    """JSON that the text does not ask for, as response_format forces it: so rare that it never comes by itself."""
    if rng.random() < 0.5:
        thing, fields = rng.choice(list(INVENTED.items()))
        value = {
            field: _invented(field, rng, "nothing") for field in fields if field == fields[0] or rng.random() < 0.7
        }
        return [user(ways.INVENTED.train(rng, thing=thing)), assistant(json.dumps(value, ensure_ascii=False))]
    kind, count = lists.kind_and_count(rng, "nothing")
    asked = lists.SEVERAL.train(rng, n=lists.COUNTS[count], things=kind)
    key = rng.choice((kind.split(" ")[0], kind.split(" ")[-1], "items", "list", "answer", "result", "values"))
    value = {key: lists.some_of(kind, count, rng)}
    return [user(asked[:1].upper() + asked[1:]), assistant(json.dumps(value, ensure_ascii=False))]


def _asked(text: str, value: dict[str, Any], rng: random.Random, held_out: HeldOut) -> list[Message]:
    """The text, with the keys or a schema said beside it or in a system prompt."""
    inner = value["person"] if "person" in value and isinstance(value["person"], dict) else value
    quoted = [f'"{key}"' for key in inner]
    keys = rng.choice((listed(list(inner)), listed(list(inner)), ", ".join(inner), listed(quoted)))
    if inner is not value:
        return [user(f"{text} {ways.NESTED.score(rng, held_out, keys=keys, outer='person')}")]
    if any(isinstance(one, dict) for one in value.values()):
        return [user(f"{text} {_schema_said(value, rng, held_out)}")]
    draw = rng.random()
    if draw < 0.5:
        return [user(f"{text} {ways.WITH_KEYS.score(rng, held_out, keys=keys)}")]
    if draw < 0.65:
        return [system(ways.ALWAYS.score(rng, held_out, keys=keys)), user(text)]
    if draw < 0.85:
        return [system(_schema_said(value, rng, held_out)), user(text)]
    return [user(f"{text} {_schema_said(value, rng, held_out)}")]


def _schema_said(value: dict[str, Any], rng: random.Random, held_out: HeldOut) -> str:
    schema = _schema(value)
    if rng.random() < 0.4:
        schema["required"] = list(value)
    return ways.SCHEMA.score(rng, held_out, schema=json.dumps(schema))


def _schema(value: Any) -> dict[str, Any]:
    kind = TYPES[type(value)]
    if isinstance(value, dict):
        return {"type": kind, "properties": {key: _schema(one) for key, one in value.items()}}
    if isinstance(value, list) and value:
        return {"type": kind, "items": _schema(value[0])}
    return {"type": kind}


def _distinct(
    draw: Callable[[random.Random, HeldOut], str], count: int, rng: random.Random, held_out: HeldOut
) -> list[str]:
    words: list[str] = []
    while len(words) < count:
        words += [one for one in [draw(rng, held_out)] if one not in words]
    return words


def _key(field: str, rng: random.Random) -> str:
    return rng.choice(KEYS[field])


def _lowered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lowered(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_lowered(one) for one in value]
    return value.lower() if isinstance(value, str) else value


_PLACES: list[Place] = [place for place in places() if not place.is_its_own_capital and place.name != "Georgia"]
