"""Structured output through the real OpenAI client: a random model says nothing but what it is let to say."""

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.integration.conftest import needs_proc
from tests.support.daemon import Daemon, wait_for

MESSAGES = [{"role": "user", "content": "Which page is it?"}]
CHAT = {"model": "quire-demo", "messages": MESSAGES, "temperature": 1.0}


class Shelf(BaseModel):
    """Nested, and optional."""

    letter: Literal["a", "b"]
    is_full: bool


class Page(BaseModel):
    """All bounded, as random weights know no end of a string."""

    kind: Literal["odd", "even"]
    number: Annotated[int, Field(ge=1, le=640)]
    words: Annotated[list[Annotated[str, Field(max_length=6)]], Field(max_length=2)]
    shelf: Shelf | None = None


def so(**constraint: object) -> dict[str, object]:
    return {"extra_body": {"structured_outputs": constraint}}


# rule: Fields: `response_format` and `structured_outputs` are enforced
def test_parse_gives_a_pydantic_object(client: openai.OpenAI) -> None:
    for seed in range(3):
        reply = client.chat.completions.parse(**CHAT, seed=seed, response_format=Page, max_completion_tokens=400)
        choice = reply.choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Page)


def test_a_parsed_stream_gives_the_same_object_as_the_plain_answer(client: openai.OpenAI) -> None:
    fields = {**CHAT, "seed": 5, "response_format": Page, "max_completion_tokens": 400}
    plain = client.chat.completions.parse(**fields).choices[0].message
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == plain.parsed
    assert final.content == plain.content


def test_a_json_object_is_one_up_to_its_end(client: openai.OpenAI) -> None:
    for seed in range(4):
        reply = client.chat.completions.create(
            **CHAT, seed=seed, response_format={"type": "json_object"}, max_completion_tokens=60
        )
        text = reply.choices[0].message.content
        assert text is not None
        assert text.startswith("{")
        if reply.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


# rule: Fields: `response_format` and `structured_outputs` are enforced
def test_regex_choice_grammar_and_schema_for_both_endpoints(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    lark = 'start: "f(" NUMBER ("," NUMBER){2} ")"\nNUMBER: /[0-9]{1,2}/'
    cases = [
        ({"regex": r"[A-Z]{2}-\d{4}"}, lambda text: re.fullmatch(r"[A-Z]{2}-[0-9]{4}", text)),
        ({"choice": ["red", "green", "blue"]}, lambda text: text in ("red", "green", "blue")),
        ({"grammar": lark}, lambda text: re.fullmatch(r"f\(\d{1,2}(,\d{1,2}){2}\)", text)),
        ({"json": schema}, lambda text: set(json.loads(text)) <= {True, False}),
        ({"json": json.dumps(schema)}, lambda text: len(json.loads(text)) in (2, 3)),
    ]
    for constraint, is_fine in cases:
        chat = client.chat.completions.create(**CHAT, **so(**constraint)).choices[0]
        text = client.completions.create(model="quire-demo", prompt="It is", max_tokens=150, **so(**constraint))
        assert (chat.finish_reason, text.choices[0].finish_reason) == ("stop", "stop")
        assert is_fine(chat.message.content)
        assert is_fine(text.choices[0].text)


def test_every_choice_of_n_keeps_to_the_grammar_on_its_own(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT, n=12, seed=1, **so(regex="[abc]{10}"))
    texts = [choice.message.content for choice in reply.choices]
    assert all(re.fullmatch("[abc]{10}", text or "") for text in texts)
    assert len(set(texts)) > 6


def test_many_at_once_beside_free_ones(daemon: Daemon) -> None:
    asyncio.run(_many_at_once(daemon))


async def _many_at_once(daemon: Daemon) -> None:
    async with openai.AsyncOpenAI(base_url=f"{daemon.base_url}/v1", api_key="unused", max_retries=0) as client:
        free = {**CHAT, "seed": 3, "max_completion_tokens": 30, "extra_body": {"ignore_eos": True}}
        alone = (await client.chat.completions.create(**free)).choices[0].message.content
        bound = [client.chat.completions.create(**CHAT, seed=i, **so(regex=f"{i}[xy]{{20}}")) for i in range(20)]
        replies = await asyncio.gather(*bound, *(client.chat.completions.create(**free) for _ in range(5)))
    for i, reply in enumerate(replies[:20]):
        assert re.fullmatch(f"{i}[xy]{{20}}", reply.choices[0].message.content)
    assert {reply.choices[0].message.content for reply in replies[20:]} == {alone}


def test_stop_strings_cut_a_constrained_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**CHAT, stop="7", **so(regex="[0-6]{3}7[0-6]{3}"))
    assert re.fullmatch("[0-6]{3}", reply.choices[0].message.content or "")


def test_what_cannot_be_enforced_is_a_400_that_says_why(client: openai.OpenAI) -> None:
    def refused(**fields: object) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as info:
            client.chat.completions.create(**CHAT, **fields)
        return info.value

    schema = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64", "not": {}}}}
    error = refused(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    assert (error.code, error.param) == ("invalid_grammar", "response_format.json_schema.schema")
    assert '"not"' in str(error.body)
    error = refused(stream=True, **so(regex="(?=a)b"))
    assert (error.code, error.param) == ("invalid_grammar", "structured_outputs.regex")
    assert "look-around" in str(error.body)


# rule: Limits: A grammar compiles within 5 s, in a process that can be killed
@needs_proc
def test_a_grammar_over_the_deadline_holds_up_nobody_and_leaves_no_process(
    daemon: Daemon, client: openai.OpenAI
) -> None:
    slow = 'start: %json {"type": "integer", "multipleOf": 100000007}'  # of a schema alone it is a 400 at once
    client.chat.completions.create(**CHAT, max_completion_tokens=1, **so(choice=["a"]))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.chat.completions.create, **CHAT, **so(grammar=slow))
        answered = 0
        while not pending.done():
            client.chat.completions.create(**CHAT, max_completion_tokens=2)
            answered += 1
        with pytest.raises(openai.BadRequestError, match="longer to compile than 5 s"):
            pending.result()
    assert answered >= 1
    reply = client.chat.completions.create(**CHAT, **so(choice=["yes"]))
    assert reply.choices[0].message.content == "yes"


@needs_proc
def test_the_daemons_end_is_the_end_of_the_checking_process(start: Callable[..., Daemon]) -> None:
    daemon = start().wait_ready()
    with openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="unused", max_retries=0) as client:
        client.chat.completions.create(**CHAT, **so(choice=["yes"]))
    checkers = [pid for pid in _descendants(daemon.process.pid) if "engine.grammar_check_process" in _command(pid)]
    assert len(checkers) == 1
    daemon.__exit__()
    wait_for(lambda: not Path(f"/proc/{checkers[0]}").exists(), timeout_s=60, what="the end of the checking process")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")


def _descendants(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return children + [grandchild for child in children for grandchild in _descendants(child)]
