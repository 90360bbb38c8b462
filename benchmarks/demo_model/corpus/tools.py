"""Tool calls: the right tool with the right arguments, the answer from its result, and no call where none fits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.demo_model.corpus import mixture
from benchmarks.demo_model.corpus.base import (
    Dialogue,
    HeldOut,
    Message,
    Phrasings,
    Question,
    Reply,
    Tool,
    assistant,
    loosely,
    user,
)
from benchmarks.demo_model.corpus.replies import with_calls
from benchmarks.demo_model.corpus.tool_grammar import REASONS, made_up
from benchmarks.demo_model.corpus.tool_jobs import ERRORS, KINDS, Job, clock, stock, weather

FAMILIES = ("weather", "timer", "time", "calculat", "stock", "email", "translate", "search")
DIRECT = ("geography", "words", "smalltalk", "quire")  # answered without a tool, whatever tools there are
TWO = Phrasings(
    ("{first} And {second}?", "{first} And what about {second}?",
     "{first} The same for {other}, please.", "{first} Tell me for {other} too."),
    ("{first} And for {other}, too.", "{first} I also want to know it for {other}."),
)  # fmt: skip
AGAIN = Phrasings(
    ("And {again}?", "What about {again}?", "And what about {again}?", "Now {again}.", "How about {again}?"),
    ("And now {again}?", "Then {again}, please."),
)
NO_TOOL = {
    "weather": ("I cannot look up the weather: I have no tool for it.", "I have no tool for the weather."),
    "clock": ("I cannot know the time: I have no tool for it.", "I have no tool for the time."),
    "stock": ("I cannot look up prices: I have no tool for it.", "I have no tool for stock prices."),
}
WHICH_CITY = (
    ("What is the weather?", "How is the weather?", "What's the weather like?", "Is it raining?", "How warm is it?"),
    ("Which city do you mean?", "In which city?", "For which city?"),
)


def dialogues(rng: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues without end."""
    direct = [mixture.skill(name).dialogues(random.Random(rng.getrandbits(64))) for name in DIRECT]
    while True:
        draw = rng.random()
        if draw < 0.62:
            yield _conversation(rng)
        elif draw < 0.74:
            yield _two_cities(rng)
        elif draw < 0.92:
            dialogue = next(rng.choice(direct))
            if not _needs_tool(dialogue.messages):
                yield Dialogue(dialogue.messages, _offered([], rng))
        elif draw < 0.96:
            yield _no_tool(rng)
        else:
            yield _asked_back(rng)


def questions(rng: random.Random) -> list[Question]:
    """Return the examination."""
    asked: list[Question] = []
    for held_out in ("nothing", "phrasing", "pair"):
        for make in [*KINDS, *[made_up] * 5]:
            for _ in range(12):
                asked += _call_questions(make(rng, held_out), held_out, rng)
        asked += [_result_question(_job(rng, held_out), held_out, rng) for _ in range(12)]
        asked += [_error_question(_job(rng, held_out), held_out, rng) for _ in range(4)]
        asked += [_two_question(held_out, rng) for _ in range(8)]
    base = [one for name in DIRECT for one in mixture.skill(name).questions(random.Random(rng.getrandbits(64)))
            if one.held_out == "nothing" and not _needs_tool(one.messages)]  # fmt: skip
    for one in rng.sample(base, 24):
        asked.append(_direct_question(one, rng))
    return asked


def calls_are(*calls: tuple[str, dict[str, Any]]) -> Callable[[Reply], bool]:
    """Whether a reply makes just these calls, in any order, strings compared without case."""
    wanted = sorted(_canonical(name, arguments) for name, arguments in calls)
    return lambda reply: sorted(_canonical(call["name"], call["arguments"]) for call in reply.tool_calls) == wanted


def is_call_of(offered: Sequence[Tool]) -> Callable[[Reply], bool]:
    """Whether a reply is one call alone, of an offered tool and with its arguments, whatever their values."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in offered}

    def is_right(reply: Reply) -> bool:
        if reply.content or len(reply.tool_calls) != 1:
            return False
        name, arguments = reply.tool_calls[0]["name"], reply.tool_calls[0]["arguments"]
        schema = schemas.get(name)
        return schema is not None and set(schema["required"]) <= arguments.keys() <= schema["properties"].keys()

    return is_right


def called(*jobs: Job) -> Message:
    """Return the assistant's message that makes the calls."""
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {
            "name": job.name, "arguments": json.dumps(job.arguments, ensure_ascii=False)}}
        for number, job in enumerate(jobs, 1)
    ]  # fmt: skip
    return assistant("", tool_calls=calls)


def result(content: str, number: int = 1) -> Message:
    """Return the message of a tool."""
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


def _job(rng: random.Random, held_out: HeldOut) -> Job:
    if rng.random() < 0.4:
        return made_up(rng, held_out)
    return rng.choices(list(KINDS), list(KINDS.values()))[0](rng, held_out)


def _offered(tools: Sequence[Tool], rng: random.Random, without: str = "") -> list[Tool]:
    """Return the tools among others, one of each name, in any order."""
    offered = list(tools)
    for _ in range(rng.choice((0, 1, 1, 2, 3) if tools else (1, 2, 3))):
        kinds = [kind for kind in KINDS if kind.__name__ != without]
        other = (made_up if rng.random() < 0.5 else rng.choice(kinds))(rng, "nothing").tool
        if {_name(other), _family(other)}.isdisjoint({one for tool in offered for one in (_name(tool), _family(tool))}):
            offered.append(other)
    rng.shuffle(offered)
    return offered


def _name(tool: Tool) -> str:
    return tool["function"]["name"]


def _family(tool: Tool) -> str:
    """What a tool does, whatever its name: two tools that do the same would leave it open which to call."""
    description = tool["function"]["description"].lower()
    return next((family for family in FAMILIES if family in description), description)


def _needs_tool(messages: Sequence[Message]) -> bool:
    """Whether a tool might well be called for what another skill answers without."""
    return any(re.search(r"what time|the time|weather|translat|stock|e-?mail|search", message["content"], re.IGNORECASE)
               for message in messages)  # fmt: skip


def _conversation(rng: random.Random) -> Dialogue:
    job = _job(rng, "nothing")
    is_on = rng.random() < 0.12
    messages = [user(loosely(job.text, rng) if job.about else job.text), called(job)]
    if rng.random() < 0.08:
        reason = rng.choice(ERRORS + REASONS)
        messages += [result(json.dumps({"error": reason})), assistant(_sorry(reason))]
    else:
        messages += [result(job.result), assistant(job.answer)]
    while job.about and rng.random() < 0.35:
        job = _another(job, rng)
        again = AGAIN.train(rng, again=job.again.format(about=job.about))
        messages += [user(again), called(job), result(job.result), assistant(job.answer)]
    if is_on:
        messages = [_thought(message, job) for message in messages]
    return Dialogue(messages, _offered([job.tool], rng), enable_thinking=is_on)


def _thought(message: Message, job: Job) -> Message:
    if message["role"] != "assistant":
        return message
    thought = (
        f"I need the tool {job.name}." if "tool_calls" in message else "The tool has answered. I say what it said."
    )
    return {**message, "reasoning_content": thought}


def _another(job: Job, rng: random.Random, held_out: HeldOut = "nothing") -> Job:
    """A job for the same tool about something else, with a result of its own."""
    kind = {"weather": weather, "time": clock, "stock": stock}[_family(job.tool)]
    while True:
        other = kind(rng, held_out)
        same_fields = list(other.arguments) == list(job.arguments)
        if same_fields and other.about != job.about and other.arguments.get("unit") == job.arguments.get("unit"):
            return Job(job.tool, other.text, other.arguments, other.result, other.answer, other.facts, other.about,
                       other.again)  # fmt: skip


def _two_jobs(rng: random.Random, held_out: HeldOut) -> tuple[str, Job, Job]:
    while True:
        one = rng.choice((weather, weather, clock))(rng, held_out)
        if one.about and "unit" not in one.arguments:
            break
    other = _another(one, rng, held_out)
    if rng.random() < 0.5:
        text = one.text.replace(one.about, f"{one.about} and {other.about}")
        return text, one, other
    second = one.again.format(about=other.about)
    return TWO.score(rng, held_out, first=one.text, second=second, one=one.about, other=other.about), one, other


def _two_cities(rng: random.Random) -> Dialogue:
    text, one, other = _two_jobs(rng, "nothing")
    messages = [user(text), called(one, other), result(one.result, 1), result(other.result, 2)]
    return Dialogue([*messages, assistant(_both(one, other))], _offered([one.tool], rng))


def _both(one: Job, other: Job) -> str:
    return f"{one.answer[:-1]}, and {other.answer.removeprefix('It is ')}"


def _sorry(reason: str) -> str:
    return f"That did not work: {reason}."


def _no_tool(rng: random.Random) -> Dialogue:
    kind = rng.choice((weather, clock, stock))
    job = kind(rng, "nothing")
    return Dialogue([user(job.text), assistant(rng.choice(NO_TOOL[kind.__name__]))], _offered([], rng, kind.__name__))


def _asked_back(rng: random.Random) -> Dialogue:
    """The city is missing: the model asks for it, and then makes the call."""
    while True:
        job = weather(rng, "nothing")
        if "unit" not in job.arguments:
            break
    reply = rng.choice(("{}.", "{}", "In {}.", "I mean {}.", "For {}, please.")).format(job.about)
    messages = [user(rng.choice(WHICH_CITY[0])), assistant(rng.choice(WHICH_CITY[1])), user(reply), called(job)]
    return Dialogue([*messages, result(job.result), assistant(job.answer)], _offered([job.tool], rng))


def _call_questions(job: Job, held_out: HeldOut, rng: random.Random) -> list[Question]:
    """The same twice: is it the right call, and has it the form of a call?"""
    example = with_calls([{"name": job.name, "arguments": job.arguments}])
    tools = _offered([job.tool], rng)
    exact, form = calls_are((job.name, job.arguments)), is_call_of(tools)
    return [
        Question("tool call", [user(job.text)], exact, held_out, tools, example=example),
        Question("tool call form", [user(job.text)], form, held_out, tools, example=example),
    ]


def _two_question(held_out: HeldOut, rng: random.Random) -> Question:
    text, one, other = _two_jobs(rng, held_out)
    calls = [(job.name, job.arguments) for job in (one, other)]
    example = with_calls([{"name": name, "arguments": arguments} for name, arguments in calls])
    tools = _offered([one.tool], rng)
    return Question("two tool calls", [user(text)], calls_are(*calls), held_out, tools, example=example)


def _result_question(job: Job, held_out: HeldOut, rng: random.Random) -> Question:
    messages = [user(job.text), called(job), result(job.result)]
    return Question(
        "tool result", messages, _tells(*job.facts), held_out, _offered([job.tool], rng), example=job.answer
    )


def _error_question(job: Job, held_out: HeldOut, rng: random.Random) -> Question:
    reason = rng.choice(ERRORS + REASONS)
    messages = [user(job.text), called(job), result(json.dumps({"error": reason}))]
    tools = _offered([job.tool], rng)
    return Question("tool error", messages, _tells(reason), held_out, tools, example=_sorry(reason))


def _direct_question(base: Question, rng: random.Random) -> Question:
    def is_right(reply: Reply) -> bool:
        return not reply.tool_calls and base.is_right(reply)

    return Question("no tool fits", base.messages, is_right, tools=_offered([], rng), example=base.example)


def _tells(*facts: str) -> Callable[[Reply], bool]:
    return lambda reply: not reply.tool_calls and all(fact.lower() in reply.content.lower() for fact in facts)


def _canonical(name: str, arguments: dict[str, Any]) -> str:
    lowered = {key: value.lower() if isinstance(value, str) else value for key, value in arguments.items()}
    return name + json.dumps(lowered, sort_keys=True)
