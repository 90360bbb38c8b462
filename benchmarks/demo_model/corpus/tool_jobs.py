"""Jobs for tools: a tool as it is offered, what a user says to have it called, the call, its result, and the answer."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.demo_model.corpus import names
from benchmarks.demo_model.corpus.base import HeldOut, Tool
from benchmarks.demo_model.corpus.held_out import keeps_sum
from benchmarks.demo_model.corpus.names import LANGUAGES, items
from benchmarks.demo_model.corpus.tool_phrasings import (
    CALCULATE,
    EMAIL,
    SEARCH,
    STOCK,
    TIME,
    TIME_HERE,
    TIMER,
    TRANSLATE,
    WEATHER,
)
from benchmarks.demo_model.corpus.topics import is_kept

SKIES = items("sunny cloudy rainy windy foggy snowy clear stormy")
ZONES = items("UTC GMT CET EST PST JST CST MST IST BST")
SYMBOLS = items("AAPL MSFT GOOG AMZN TSLA NVDA AMD IBM INTC ORCL SAP NFLX")
NEW_SYMBOLS = "SONY", "ASML", "UBER", "SHEL"
AFFIXES = items(
    "get do fetch show read find ask run make query use tool service api info today world local call for by"
)
ERRORS = ("city not found", "service unavailable", "timeout", "no connection", "unknown place", "too many requests")


@dataclass(frozen=True)
class Job:
    """One call of a tool and what goes with it."""

    tool: Tool
    text: str  # what the user says
    arguments: dict[str, Any]
    result: str  # what the tool says
    answer: str
    facts: Sequence[str]  # what an answer that uses the result contains
    about: str = ""  # what a following "And …?" changes
    again: str = ""  # how it is asked for once more: "in {about}"

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.tool["function"]["name"]


@dataclass(frozen=True)
class Names:
    """Names that a kind of tool has, some kept for scoring."""

    seen: Sequence[str]
    stems: Sequence[str]  # words of such names, which others are made of
    unseen: Sequence[str] = ()

    def draw(self, rng: random.Random, held_out: HeldOut) -> str:
        """Return one of them."""
        if held_out == "nothing" and rng.random() < 0.6:
            return any_name(rng, self.stems)
        return rng.choice(self.unseen if held_out == "pair" and self.unseen else self.seen)


def any_name(rng: random.Random, stems: Sequence[str] = ()) -> str:
    """Return a name that no list has, so that it is read from the tool; of the stems, mostly, it has one."""
    while True:
        stem = rng.choice(stems) if stems and rng.random() < 0.6 else names.coined(rng)
        other = names.coined(rng) if rng.random() < 0.6 else rng.choice(AFFIXES)
        name = rng.choice(
            (f"{other}_{stem}", f"{other}_{stem}", f"{stem}_{other}", f"{stem}_{other}", f"{other}{stem.capitalize()}",
             f"{stem}{other.capitalize()}", f"{stem}-{other}", f"my_{stem}", f"{other}")
        )  # fmt: skip
        if not is_kept_name(name):
            return name


def is_kept_name(name: str) -> bool:
    """Whether a tool of this name is for scoring alone."""
    return is_kept(name) or any(
        name in kind.unseen for kind in (WEATHER_NAMES, CALCULATOR_NAMES, CLOCK_NAMES, TIMER_NAMES)
    )


def make_tool(name: str, description: str, properties: dict[str, dict[str, Any]], required: Sequence[str]) -> Tool:
    """Return a tool in the form of an OpenAI request."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_field(description: str = "") -> dict[str, Any]:
    """Return the schema of a string."""
    return {"type": "string", "description": description} if description else {"type": "string"}


def weather(rng: random.Random, held_out: HeldOut) -> Job:
    """The weather in a city, perhaps in a unit."""
    city, field = _city(rng, held_out), rng.choice(("city", "city", "location", "place"))
    properties, arguments, unit = {field: text_field(f"The {field}")}, {field: city}, ""
    text = WEATHER.score(rng, held_out, city=city)
    if rng.random() < 0.5:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.5 and not text.startswith(("Is ", "Do ")):
            unit = rng.choice(("celsius", "fahrenheit"))
            arguments["unit"] = unit
            text = text.rstrip("?.") + f" in {unit.capitalize()}" + text[-1]
    tool = make_tool(WEATHER_NAMES.draw(rng, held_out), rng.choice(
        ("Get the weather of a city.", "The weather now in a place.", "Current weather for a city.")
    ), properties, [field])  # fmt: skip
    degrees, sky = rng.choice((*range(-9, -1), *range(2, 36))), rng.choice(SKIES)
    result = {"temperature": degrees, "condition": sky}
    if unit:
        result["unit"] = unit
    if rng.random() < 0.3:
        result = {field: city, **result}
    shown = json.dumps(result) if rng.random() < 0.8 else f"{degrees} degrees, {sky}"
    scale = f" {unit.capitalize()}" if unit else ""
    answer = f"It is {degrees} degrees{scale} and {sky} in {city}."
    return Job(tool, text, arguments, shown, answer, (str(degrees), sky), city, "in {about}")


def calculator(rng: random.Random, held_out: HeldOut) -> Job:
    """A sum that is too large to be done without help."""
    sign, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "divided by")))
    while True:
        a, b = rng.randint(11, 999), rng.randint(11, 99)
        a = b * rng.randint(2, 40) if sign == "/" else a
        if not keeps_sum(a, sign, b):
            break
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    expression = f"{a} {sign} {b}"
    text = CALCULATE.score(rng, held_out, sum=rng.choice((expression, f"{a} {word} {b}")))
    field = rng.choice(("expression", "expression", "expr", "formula"))
    tool = make_tool(CALCULATOR_NAMES.draw(rng, held_out), rng.choice(
        ("Calculate an expression.", "A calculator.", "Calculate the value of an expression.")
    ), {field: text_field('Such as "2 + 3"')}, [field])  # fmt: skip
    shown = rng.choice((str(value), json.dumps({"result": value}), json.dumps({"value": value})))
    return Job(tool, text, {field: expression}, shown, f"{expression} is {value}.", (str(value),))


def clock(rng: random.Random, held_out: HeldOut) -> Job:
    """The time in a city or a time zone, or here."""
    name = CLOCK_NAMES.draw(rng, held_out)
    description = rng.choice(("Get the time.", "The time now.", "The current time in a place."))
    time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    shown = rng.choice((time, json.dumps({"time": time}), json.dumps({"local_time": time})))
    if rng.random() < 0.15:
        text = TIME_HERE.score(rng, held_out)
        return Job(make_tool(name, description, {}, []), text, {}, shown, f"It is {time}.", (time,))
    field = rng.choice(("city", "city", "location", "timezone"))
    where = rng.choice(ZONES) if field == "timezone" else _city(rng, held_out)
    tool = make_tool(name, description, {field: text_field(f"The {field}")}, [field])
    text = TIME.score(rng, held_out, city=where)
    return Job(tool, text, {field: where}, shown, f"It is {time} in {where}.", (time,), where, "in {about}")


def search(rng: random.Random, held_out: HeldOut) -> Job:
    """A search for something."""
    word = names.word(rng, held_out)
    query = rng.choice(("{} recipe", "{} facts", "history of the {}", "{} pictures", "{} prices")).format(word)
    tool = make_tool(SEARCH_NAMES.draw(rng, held_out), "Search the web.",
                     {"query": text_field("What to search for")}, ["query"])  # fmt: skip
    count = rng.randint(2, 90)
    answer = f'I found {count} results for "{query}".'
    shown = json.dumps({"num_results": count})
    return Job(tool, SEARCH.score(rng, held_out, query=query), {"query": query}, shown, answer, (str(count),))


def email(rng: random.Random, held_out: HeldOut) -> Job:
    """A message to somebody."""
    who, subject = names.person(rng, "nothing"), names.word(rng, held_out)
    to = f"{who.lower().replace(' ', '.')}@example.com"
    properties = {"to": text_field("Address"), "subject": text_field("Subject")}
    tool = make_tool(EMAIL_NAMES.draw(rng, held_out), "Send an email.", properties, list(properties))
    text = EMAIL.score(rng, held_out, to=to, subject=subject)
    arguments = {"to": to, "subject": subject}
    return Job(tool, text, arguments, json.dumps({"status": "sent"}), f"I sent the email to {to}.", (to,))


def stock(rng: random.Random, held_out: HeldOut) -> Job:
    """The price of a share."""
    symbol, price = rng.choice(NEW_SYMBOLS if held_out == "pair" else SYMBOLS), rng.randint(20, 900)
    if held_out == "nothing" and rng.random() < 0.5:
        symbol = "".join(rng.choices(string.ascii_uppercase, k=rng.choice((3, 4, 4))))
        if symbol in NEW_SYMBOLS:
            symbol = SYMBOLS[0]
    field = rng.choice(("symbol", "ticker"))
    tool = make_tool(STOCK_NAMES.draw(rng, held_out), "Get the price of a stock.",
                     {field: text_field("Such as AAPL")}, [field])  # fmt: skip
    text = STOCK.score(rng, held_out, symbol=symbol)
    return Job(tool, text, {field: symbol}, json.dumps({"price": price}), f"{symbol} is at {price}.",
               (str(price),), symbol, "{about}")  # fmt: skip


def translation(rng: random.Random, held_out: HeldOut) -> Job:
    """A word in another language."""
    word, language = names.word(rng, held_out), rng.choice(LANGUAGES)
    properties = {"text": text_field("The text"), "language": text_field("The language")}
    tool = make_tool(TRANSLATE_NAMES.draw(rng, held_out), "Translate a text.", properties, list(properties))
    text = TRANSLATE.score(rng, held_out, word=word, language=language)
    told = "".join(rng.choice(("ba", "lo", "mi", "re", "su", "ta", "ne")) for _ in range(3))
    answer = f'"{word}" is "{told}" in {language}.'
    return Job(tool, text, {"text": word, "language": language}, json.dumps({"translation": told}), answer, (told,))


def timer(rng: random.Random, held_out: HeldOut) -> Job:
    """A timer of some minutes."""
    minutes, unit = rng.randint(1, 60), rng.choice(("minutes", "minutes", "seconds"))
    properties = {unit: {"type": "integer"}}
    tool = make_tool(TIMER_NAMES.draw(rng, held_out), "Set a timer.", properties, [unit])
    text = TIMER.score(rng, held_out, time=f"{minutes} {unit}")
    shown = rng.choice((json.dumps({"status": "ok"}), "ok"))
    return Job(tool, text, {unit: minutes}, shown, f"The timer is set to {minutes} {unit}.", (f"{minutes} {unit}",))


def _city(rng: random.Random, held_out: HeldOut) -> str:
    return names.city(rng, held_out)


KINDS: dict[Callable[[random.Random, HeldOut], Job], float] = {
    weather: 5.0, calculator: 3.0, clock: 3.0, search: 1.0, email: 1.0, stock: 1.0, translation: 1.0, timer: 1.0,
}  # fmt: skip
WEATHER_NAMES = Names(("get_weather", "get_weather", "get_current_weather", "weather", "fetch_weather", "weather_info"),
                      ("weather", "weather", "forecast"), ("check_weather", "weather_now"))  # fmt: skip
CALCULATOR_NAMES = Names(("calculator", "calculator", "calculate", "calc"), ("calculate", "calculator", "calc", "math"),
                         ("calculate_expression", "compute"))  # fmt: skip
CLOCK_NAMES = Names(("get_time", "get_time", "get_current_time", "current_time", "clock", "world_clock"),
                    ("time", "time", "clock"), ("time_now", "check_time"))  # fmt: skip
TIMER_NAMES = Names(("set_timer", "start_timer", "timer"), ("timer", "timer", "countdown"), ("new_timer", "timer_set"))
SEARCH_NAMES = Names(("search_web", "web_search", "search"), ("search", "web"))
EMAIL_NAMES = Names(("send_email", "email", "send_mail"), ("email", "mail", "send"))
STOCK_NAMES = Names(("get_stock_price", "stock_price"), ("stock", "price"))
TRANSLATE_NAMES = Names(("translate", "translate_text"), ("translate", "translation"))
