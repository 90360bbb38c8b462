"""What one request may cost an HTTP worker: it is refused by its size, before the work, and others go on meanwhile."""

import asyncio
import gc
import sys
import threading

import msgspec
import pytest
from tokenizers import AddedToken

from server.api.chat.writer import ChatWriter
from server.api.heavy_work import HeavyWork
from server.api.large_bodies import BodyPlace, LargeBodies
from server.api.limits import ROUTE_COSTS, RequestLimits
from server.api.strict_json import parse_body, parse_json
from server.http.routes.api_route import router_of
from server.text.tokenizer import Tokenizer
from tests.support.costly_bodies import COSTLY_BODIES, max_body_bytes
from tests.support.fakes import READY
from tests.unit.server.conftest import CHAT, COMPLETIONS, USER_HI, check_error, train_byte_level, write_model_folder

pytestmark = pytest.mark.slow

COUNT = "/v1/messages/count_tokens"
JSON_TYPE = {"content-type": "application/json"}
TEXT = "Hello, world! "


@pytest.fixture
def encoded(monkeypatch):
    """Collect the sizes of the texts that are encoded."""
    sizes: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **kw: sizes.append(len(text)) or encode(self, text, **kw)
    )
    return sizes


# rule: Limits: What is counted without generation: 65,536 tokens or two contexts, refused before it is encoded
def test_a_text_that_is_surely_too_long_to_count_is_refused_before_it_is_encoded(harness, encoded):
    app, text = harness(), TEXT * 400_000
    for field in ("prompt", "content"):
        error = check_error(app.post("/tokenize", {field: text}), 400, "context_length_exceeded")
        assert error["param"] == field
        assert "65536" in error["message"]
    chat = [{"role": "user", "content": text}]
    assert check_error(app.post("/tokenize", {"messages": chat}), 400, "context_length_exceeded")["param"] == "messages"
    reply = app.post(COUNT, {"model": "tiny", "messages": chat})
    assert reply.status_code == 400
    assert "65536" in reply.json()["error"]["message"]
    assert encoded == []


def test_a_text_too_long_to_count_is_encoded_in_pieces_up_to_twice_the_limit(harness, encoded, monkeypatch):
    monkeypatch.setattr(RequestLimits, "counted_tokens_of", lambda self, max_model_len: 16_384)
    error = check_error(harness().post("/tokenize", {"prompt": "q" * 250_000}), 400, "context_length_exceeded")
    assert "16384" in error["message"]
    assert encoded == [65_536]


def test_without_a_bound_for_a_tokens_text_pieces_are_counted(harness, tmp_path, encoded):
    app = harness(folder=write_model_folder(tmp_path / "m", tokenizer=with_lost_text()))
    error = check_error(app.complete(prompt=TEXT * 60_000), 400, "context_length_exceeded")
    assert (error["param"], encoded) == ("prompt", [65_536])
    assert "the first 65536 of the prompt's 840000 characters alone are" in error["message"]
    error = check_error(app.complete(prompt=TEXT * 600), 400, "context_length_exceeded")
    assert "but the prompt's 8400 characters are" in error["message"]


def with_lost_text():
    """A tokenizer with a token that takes any number of spaces before it."""
    tokenizer = train_byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def test_texts_up_to_the_limit_are_counted(harness):
    app = harness()
    assert app.post("/tokenize", {"prompt": "q" * 65_536}).json()["count"] == 65_536
    check_error(app.post("/tokenize", {"prompt": "q" * 65_537}), 400, "context_length_exceeded")


# rule: Limits: A list of prompts is refused at the first that is too long
def test_a_list_of_prompts_is_refused_at_the_first_that_is_too_long(harness, encoded):
    app = harness()
    check_error(app.complete(prompt=["q" * 300] * 1024), 400, "context_length_exceeded")
    assert encoded == [300]
    encoded.clear()
    check_error(app.complete(prompt=["q", *["q" * 8000] * 1000]), 400, "context_length_exceeded")
    assert encoded == []


# rule: Limits: All prompts of a request have 1,048,576 tokens, or one context
def test_all_prompts_of_a_request_are_bounded_together(harness, monkeypatch):
    monkeypatch.setattr(RequestLimits, "prompt_tokens_of", lambda self, max_model_len: 100)
    app = harness()
    assert app.complete(prompt=["q" * 50] * 2).status_code == 200
    for prompts in (["q" * 50] * 3, [[5] * 50] * 3):
        assert "100" in check_error(app.complete(prompt=prompts), 400, "invalid_parameter")["message"]


# rule: Limits: Long texts and large bodies wait for few threads, short ones never wait for them
def test_short_texts_do_not_wait_for_long_ones(harness, monkeypatch):
    app, may_go, num_running, most = harness(), threading.Event(), 0, 0
    encode, lock = Tokenizer.encode, threading.Lock()

    def slow_encode(self, text, **kw):
        nonlocal num_running, most
        if len(text) > 1000:
            with lock:
                num_running += 1
                most = max(most, num_running)
            assert may_go.wait(60)
            with lock:
                num_running -= 1
        return encode(self, text, **kw)

    monkeypatch.setattr(Tokenizer, "encode", slow_encode)

    async def run() -> list[int]:
        async with app.http() as http:
            long = [asyncio.create_task(http.post("/tokenize", json={"prompt": TEXT * 6000})) for _ in range(24)]
            while num_running < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # in which a third would begin
            short = await asyncio.wait_for(http.post("/tokenize", json={"prompt": "Hi"}), 30)
            may_go.set()
            return [short.status_code, *(reply.status_code for reply in await asyncio.gather(*long))]

    assert set(asyncio.run(asyncio.wait_for(run(), 60))) == {200}
    assert most == 2


DENSE = {
    "objects and lists": b'{"prompt": [' + b"[]," * 2_699_999 + b"[]" + b"]}",
    "strings": b'{"prompt": [' + b'"",' * 2_699_999 + b'""' + b"]}",
    "commas between values": b'{"prompt": [' + b"1," * 3_999_999 + b"1" + b"]}",
}


# rule: Limits: JSON: 131,072 objects and lists, 262,144 strings, 1,179,648 commas, counted before it is decoded
@pytest.mark.parametrize("noun", DENSE)
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(harness, noun, monkeypatch):
    app = harness()
    monkeypatch.setattr("msgspec.json.decode", lambda body: pytest.fail("it was decoded"))
    error = check_error(app.post(COMPLETIONS, content=DENSE[noun], headers=JSON_TYPE), 400, "malformed_json")
    assert noun in error["message"]


@pytest.mark.parametrize("text", ['[{,"\\' * 200_000, '\\"[],' * 150_000])
def test_brackets_commas_and_quotes_within_a_text_count_for_nothing(harness, text):
    app = harness(engine={"ready": msgspec.structs.replace(READY, max_model_len=2**21)})
    assert app.complete(prompt=text, max_tokens=1).status_code == 200


def test_large_bodies_are_decoded_outside_the_event_loop(harness, monkeypatch):
    threads = []
    monkeypatch.setattr(
        "server.http.routes.request_body.parse_json",
        lambda body: threads.append(threading.current_thread().name) or parse_json(body),
    )
    app = harness()
    app.complete(user="u" * 70_000)
    app.complete()
    assert [name.startswith("body") for name in threads] == [True, False]


# rule: Limits: All large bodies of a worker: 64 MiB, beyond that 503 with `Retry-After`; small ones pass
def test_large_bodies_are_bounded_together_and_small_ones_pass(harness, monkeypatch):
    monkeypatch.setattr("server.api.large_bodies.LIMITS", RequestLimits(bodies_bytes=1_000_000))
    app, may_end, num_held = harness(), asyncio.Event(), 0

    async def slow_body():
        nonlocal num_held
        yield b'{"model": "tiny", "prompt": "Hi", "user": "'
        yield b"u" * 300_000
        num_held += 1  # what came before is read
        await may_end.wait()
        yield b'"}'

    async def run() -> None:
        async with app.http() as http:
            slow = [asyncio.create_task(http.post(COMPLETIONS, content=slow_body(), headers=JSON_TYPE)) for _ in "123"]
            while num_held < 3:
                await asyncio.sleep(0.001)
            refused = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "x" * 300_000})
            check_error(refused, 503, "too_many_bodies")
            assert refused.headers["retry-after"] == "1"
            assert (await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "Hello"})).status_code == 200
            may_end.set()
            assert {reply.status_code for reply in await asyncio.gather(*slow)} == {400}  # user is too long
            late = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "x" * 300_000})
            check_error(late, 400, "context_length_exceeded")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_full_garbage_collections_are_rare_while_large_bodies_are_held():
    usual, bodies = gc.get_threshold(), LargeBodies(HeavyWork())
    first, second, small = (BodyPlace(bodies) for _ in range(3))
    small.add(1000)
    assert gc.get_threshold() == usual
    first.add(100_000)
    second.add(100_000)
    first.release()
    assert gc.get_threshold()[:2] == usual[:2]
    assert gc.get_threshold()[2] == 10 * usual[2]
    second.release()
    second.release()
    assert gc.get_threshold() == usual


def test_the_memory_of_a_refused_body_is_free_without_a_garbage_collection(harness):
    app = harness()
    bodies = [{"messages": USER_HI * 2000}, {"messages": [*USER_HI * 2000, 5]}, {"messages": USER_HI * 2000, "n": 0}]

    async def run() -> None:
        async with app.http() as http:
            for body in bodies:
                for is_first in (True, False):  # what is made but once
                    gc.collect()
                    num_before = sys.getallocatedblocks()
                    gc.disable()
                    assert (await http.post(CHAT, json=body)).status_code == 400
                    await asyncio.sleep(0.05)
                    assert is_first or sys.getallocatedblocks() - num_before < 1000
                    gc.enable()

    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_body_makes_room_when_its_prompt_is_made(harness, monkeypatch):
    monkeypatch.setattr("server.api.large_bodies.LIMITS", RequestLimits(bodies_bytes=100_000))
    hold = asyncio.Event()
    app = harness(engine={"hold": hold})
    body = {"model": "tiny", "prompt": "Hi", "metadata_of_mine": "u" * 70_000}

    async def run() -> None:
        async with app.http() as http:
            first = asyncio.create_task(http.post(COMPLETIONS, json=body))
            while not app.client.submitted:
                await asyncio.sleep(0.01)
            second = asyncio.create_task(http.post(COMPLETIONS, json=body))
            while len(app.client.submitted) < 2:
                await asyncio.sleep(0.01)
            hold.set()
            assert [reply.status_code for reply in await asyncio.gather(first, second)] == [200, 200]

    asyncio.run(asyncio.wait_for(run(), 60))


ENTRIES = [
    (CHAT, {"logprobs": True, "top_logprobs": 4, "n": 2, "max_tokens": 10}, {"max_tokens": 11}, "top_logprobs"),
    (CHAT, {"logprobs": True, "n": 10, "max_tokens": 10}, {"n": 11}, "logprobs"),
    (COMPLETIONS, {"logprobs": 1, "prompt": ["a", "b"], "max_tokens": 25}, {"max_tokens": 26}, "logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 3, "prompt": [[5] * 25]}, {"prompt": [[5] * 26]}, "prompt_logprobs"),
    ("/v1/responses", {"top_logprobs": 4, "max_output_tokens": 20}, {"max_output_tokens": 21}, "top_logprobs"),
]


# rule: Limits: Log-probabilities of an answer: 524,288, over choices, tokens, alternatives and prompts
@pytest.mark.parametrize(("path", "edge", "beyond", "param"), ENTRIES)
def test_an_answer_of_too_many_log_probabilities_is_refused_before_any_work(
    harness, path, edge, beyond, param, monkeypatch
):
    monkeypatch.setattr("server.api.generation_spec.LIMITS", RequestLimits(answer_entries=100))
    app = harness()
    body = {CHAT: {"messages": USER_HI}, "/v1/responses": {"input": "hi"}}.get(path, {}) | edge
    assert app.post(path, body).status_code == 200
    num_submitted = len(app.client.submitted)
    error = check_error(app.post(path, body | beyond), 400, "invalid_parameter")
    assert error["param"] == param
    assert "100" in error["message"]
    assert len(app.client.submitted) == num_submitted


def test_without_max_tokens_an_answer_ends_where_its_log_probabilities_are_at_the_limit(harness, monkeypatch):
    monkeypatch.setattr("server.api.generation_spec.LIMITS", RequestLimits(answer_entries=10))
    choice = harness("Hello, world! " * 9).chat(logprobs=True, top_logprobs=1).json()["choices"][0]
    assert (len(choice["logprobs"]["content"]), choice["finish_reason"]) == (5, "length")


def test_answers_with_many_log_probabilities_are_written_outside_the_event_loop(harness, monkeypatch):
    app, threads = harness("Hello, world! " * 8), []
    whole = ChatWriter.whole
    monkeypatch.setattr(ChatWriter, "whole", lambda *args: threads.append(threading.current_thread()) or whole(*args))
    for fields in ({}, {"n": 4, "logprobs": True, "top_logprobs": 20}):
        assert app.chat(**fields).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.fixture
def schemas(harness, monkeypatch):
    """By path, the schema of the body that a route reads."""
    rows = []
    monkeypatch.setattr(
        "server.http.app.router_of",
        lambda routes, **options: router_of([rows.append(row) or row for row in routes], **options),
    )
    harness()
    return {row.path: row.body for row in rows if row.body is not None}


def test_every_route_that_reads_a_body_has_its_bounds_and_costliest_bodies(schemas):
    assert set(schemas) == set(ROUTE_COSTS) == {body.path for body in COSTLY_BODIES.values()}


@pytest.mark.full  # the tests that send them are
def test_every_route_takes_its_costliest_bodies(schemas):
    for name, body in COSTLY_BODIES.items():
        assert len(body.content) <= max_body_bytes(), name
        parse_body(schemas[body.path], parse_json(body.content))
