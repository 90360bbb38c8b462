"""The HTTP contract on a fake engine: answers, streams, errors on every path, readiness."""

import asyncio
import gc
import json
import logging
import threading
from types import SimpleNamespace

import msgspec
import pytest
from starlette.requests import Request

from engine.interface.control import Stage, State
from engine.interface.errors import InvalidParameter
from server.api.chat.request import encode_chat
from server.api.heavy_work import HeavyWork
from server.api.large_bodies import LargeBodies, give_place
from server.api.limits import LIMITS
from server.api.schemas import ChatBody
from server.api.strict_json import parse_body
from server.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.fakes import READY, FakeLauncherChannel
from tests.unit.server.conftest import (
    COMPLETIONS,
    USER_HI,
    chat_text,
    check_error,
    stream_chunks,
    write_model_folder,
)

TEXT = "Schöne Grüße, 日本語 😀👍🏽!"


# rule: Endpoints: Chat completions answer in OpenAI's form
def test_a_chat_answer_has_openais_form(harness):
    app = harness(TEXT, engine={"num_cached_tokens": 3})
    reply = app.chat()
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    num_out = len(app.ids(TEXT))
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = app.client.submitted[0].prompt_token_ids
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_out,
        "total_tokens": len(prompt) + num_out,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert set(body["timings"]) == {"queue_ms", "prefill_ms", "ttft_ms", "itl_ms", "total_ms"}
    assert app.tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


# rule: Streams: The chunks joined are the whole answer
@pytest.mark.parametrize("tokens_per_delta", [1, 3])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"stop": ["日本"]}, {"stop": "zzz"}, {"max_tokens": 4}, {"logprobs": True}]
)
def test_a_streams_chunks_joined_are_the_whole_answer(harness, fields, tokens_per_delta):
    app = harness(TEXT, engine={"tokens_per_delta": tokens_per_delta})
    whole = app.chat(**fields).json()
    chunks = stream_chunks(app.chat(**fields, stream=True).text)
    for choice in whole["choices"]:
        assert chat_text(chunks, choice["index"]) == choice["message"]["content"]
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["delta"] == {}
        logprobs = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert logprobs == (choice["logprobs"]["content"] if choice["logprobs"] else [])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert "timings" in chunks[-1]
    assert all("timings" not in chunk and "usage" not in chunk for chunk in chunks[:-1])


# rule: Streams: A stream has the headers that stop proxies from buffering
def test_a_stream_has_the_headers_that_proxies_need(harness):
    headers = harness().chat(stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-accel-buffering"] == "no"
    assert "no-cache" in headers["cache-control"]
    assert "content-length" not in headers


# rule: Fields: `stream_options` puts usage at the end, or in every chunk
# rule: Streams: Role, text, finish, usage, `[DONE]`, in this order; one id, time and model
def test_usage_comes_in_a_last_chunk_without_choices(harness):
    chunks = stream_chunks(harness().chat(stream=True, stream_options={"include_usage": True}).text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert "timings" in chunks[-1]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_continuous_usage_counts_up(harness):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream_chunks(harness().chat(stream=True, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


# rule: Fields: Log-probabilities have both of OpenAI's forms
def test_logprobs_have_openais_form(harness):
    app = harness("é!")
    body = app.chat(logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é!"
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)


# rule: Fields: Log-probabilities have both of OpenAI's forms
def test_legacy_logprobs_have_their_own_form(harness):
    choice = harness("Hello, world!").complete(logprobs=1).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"][0] == 0
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"])


@pytest.mark.parametrize("tokens_per_delta", [1, 4])
def test_text_offsets_count_the_characters_before_each_token(harness, tokens_per_delta):
    """A character of several tokens counts once it is complete, a hidden token not at all."""
    app = harness(engine={"tokens_per_delta": tokens_per_delta})
    ids = [*app.ids("ab"), 0, *app.ids("é日😀x"), *app.ids("yz")]
    app.client.script = ids
    decoded = [app.tokenizer.decode(ids[:i]).rstrip("\ufffd") for i in range(len(ids))]
    choice = app.complete(logprobs=1, max_tokens=99).json()["choices"][0]
    assert choice["text"] == "abé日😀xyz"
    assert choice["logprobs"]["text_offset"] == [len(text) for text in decoded]
    assert max(choice["logprobs"]["text_offset"]) < len(choice["text"])
    chunks = stream_chunks(app.complete(logprobs=1, max_tokens=99, stream=True).text)
    offsets = [
        offset for chunk in chunks for c in chunk["choices"] if c["logprobs"] for offset in c["logprobs"]["text_offset"]
    ]
    assert offsets == choice["logprobs"]["text_offset"]


# rule: Endpoints: Completions answer in OpenAI's form
def test_completions_take_all_four_forms_of_a_prompt(harness):
    app = harness("Hello")
    ids = app.ids("Hello")
    for prompt, num_choices in (("Hello", 1), (["Hello", "Hello"], 2), (ids, 1), ([ids, ids], 2)):
        app.client.submitted.clear()
        body = app.complete(prompt=prompt).json()
        assert body["object"] == "text_completion"
        assert [choice["index"] for choice in body["choices"]] == list(range(num_choices))
        assert all(request.prompt_token_ids == ids for request in app.client.submitted)


# rule: Fields: `echo` acts, also with `logprobs`
@pytest.mark.parametrize("prompt", ["Say: ", [300, 301]])
def test_echo_puts_the_prompt_first(harness, prompt):
    app = harness("Hello")
    text = prompt if isinstance(prompt, str) else app.tokenizer.decode(prompt)
    assert app.complete(prompt=prompt, echo=True).json()["choices"][0]["text"] == text + "Hello"
    chunks = stream_chunks(app.complete(prompt=prompt, echo=True, stream=True).text)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text + "Hello"


# rule: Fields: `return_token_ids` acts
def test_token_ids_are_returned_when_asked_for(harness):
    app = harness("Hello, world!")
    for body in (app.chat(return_token_ids=True).json(), app.complete(return_token_ids=True).json()):
        choice = body["choices"][0]
        assert choice["token_ids"] == app.ids("Hello, world!")
        prompt_ids = body.get("prompt_token_ids", choice.get("prompt_token_ids"))
        assert prompt_ids in [request.prompt_token_ids for request in app.client.submitted]
    chunks = stream_chunks(app.chat(return_token_ids=True, stream=True).text)
    assert [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", [])] == app.ids("Hello, world!")


# rule: Fields: Unknown fields are named in a header, or with `--reject-unknown-fields` refused
def test_unknown_fields_are_named_in_a_header_or_refused(harness):
    reply = harness().chat(foo=1, **{"b\nad": 2})
    assert reply.status_code == 200
    assert reply.headers["x-quire-ignored"] == "b?ad, foo"
    assert harness().chat(foo=1, stream=True).headers["x-quire-ignored"] == "foo"
    reply = harness().chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")
    assert (reply.status_code, reply.headers["x-quire-ignored"]) == (200, "tools")
    assert "x-quire-ignored" not in harness().chat(user="u").headers
    reply = harness(strict=True).chat(foo=1)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "foo")


# rule: Endpoints: Models are listed, and each is there by its id
# rule: Fields: `model` is a served name, or absent
def test_every_served_name_is_a_model(harness):
    app = harness()
    assert [card["id"] for card in app.get("/v1/models").json()["data"]] == ["tiny", "alias/tiny"]
    said = check_error(app.get("/v1/models/"), 404, "not_found")["message"]
    assert said == "There is no route /v1/models/: it is /v1/models on this server."
    card = app.get("/v1/models/alias/tiny").json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("alias/tiny", "model", 256)
    assert app.chat(model="alias/tiny").json()["model"] == "alias/tiny"
    assert app.chat(model=None).json()["model"] == "tiny"


def test_rejections_are_counted_by_reason(harness):
    app = harness(launcher=(launcher := FakeLauncherChannel()))
    app.chat(n=0)
    app.post("/nothing", {})
    launcher.state = State(Stage("ready"), True)
    app.chat()
    launcher.state = State(Stage("weights"), False)
    app.chat()
    counters = app.metrics.drain().counters
    assert counters["requests_rejected_total", "invalid"] == 2
    assert counters["requests_rejected_total", "draining"] == 1
    assert counters["requests_rejected_total", "not_ready"] == 1


# rule: Security: No key and no text in logs and errors
def test_each_request_leaves_one_line_without_its_text(harness, caplog):
    caplog.set_level(logging.INFO, "quire.access")
    app = harness("Hello, world!", engine={"num_cached_tokens": 2})
    app.chat(max_tokens=3)
    app.chat(stream=True)
    app.chat(n=0)
    app.post("/a%0Ab", {})
    app.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "quire.access"]
    assert len(lines) == 4
    num_in = len(app.client.submitted[0].prompt_token_ids)
    assert lines[0].startswith(f"POST /v1/chat/completions 200 in={num_in} cached=2 out=3 ttft=")
    assert " itl=" in lines[0]
    assert lines[0].split()[-2] == "length"
    assert lines[1].split()[-2] == "stop"
    assert " 400 invalid_parameter req-" in lines[2]
    assert "\n" not in lines[3]


def test_concurrent_requests_do_not_mix(harness):
    app = harness(engine={"script": lambda request: [*request.prompt_token_ids], "delay_s": 0.001})

    async def ask_all():
        async with app.http() as http:
            bodies = [{"prompt": f"number {i}", "stream": i % 2 == 0, "max_tokens": 99} for i in range(40)]
            return await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies))

    for i, reply in enumerate(asyncio.run(ask_all())):
        if i % 2 == 0:
            text = "".join(c["text"] for chunk in stream_chunks(reply.text) for c in chunk["choices"])
        else:
            text = msgspec.json.decode(reply.content)["choices"][0]["text"]
        assert text == f"number {i}"


def test_answers_are_utf8_and_not_escaped(harness):
    assert "日本語" in harness(TEXT).chat().content.decode()
    assert json.loads(harness(TEXT).chat().content)["choices"][0]["message"]["content"] == TEXT


# rule: Limits: A template renders within 2 s, sandboxed, beside the loop
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
        "{% for i in range(9000) %}{% for j in range(200) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_runs_too_long_is_a_400(harness, tmp_path, monkeypatch, source):
    """Whether it writes something meanwhile or not."""
    monkeypatch.setattr("server.text.tokenizer.TEMPLATE_DEADLINE_S", 0.01)
    app = harness(folder=write_model_folder(tmp_path, chat_template=source))
    assert "2 s" in check_error(app.chat(), 400, "invalid_parameter")["message"]


def is_in_loop() -> bool:
    """Return whether an event loop runs the caller."""
    try:
        return asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


def rendering_threads(monkeypatch) -> list[tuple[bool, bool]]:
    """Return the renders that begin from now on: whether each is to be brief, and whether it is on the event loop."""
    renders, render_chat = [], Tokenizer.render_chat

    def watched(self, *args, is_brief=False, **kwargs):
        renders.append((is_brief, is_in_loop()))
        return render_chat(self, *args, is_brief=is_brief, **kwargs)

    monkeypatch.setattr(Tokenizer, "render_chat", watched)
    return renders


def test_a_small_chat_is_rendered_on_the_event_loop_and_another_one_beside_it(harness, monkeypatch):
    app, renders = harness("hi"), rendering_threads(monkeypatch)
    monkeypatch.setattr("server.text.tokenizer._BRIEF_S", 60.0)  # a collection of garbage takes longer than 5 ms
    small, large = USER_HI, [{"role": "user", "content": "hi " * LIMITS.brief_bytes}]
    for messages in (small, large):
        assert app.chat(messages=messages).status_code in (200, 400)  # the large one may exceed the context
    assert renders == [(True, True), (False, False)]


def test_a_small_chat_that_takes_long_is_rendered_beside_the_event_loop(harness, tmp_path, monkeypatch):
    source = "{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}"
    app = harness("hi", folder=write_model_folder(tmp_path, chat_template=source))
    renders = rendering_threads(monkeypatch)
    monkeypatch.setattr("server.api.heavy_work._NO_BRIEF_S", 3600.0)
    monkeypatch.setattr("server.text.tokenizer._BRIEF_S", 60.0)  # its steps alone are too many
    for _ in range(2):
        assert app.chat().status_code == 200
    assert renders == [(True, True), (False, False), (False, False)]
    assert len({bytes(request.prompt) for request in app.client.submitted}) == 1


@pytest.mark.parametrize(
    ("fields", "is_on_loop"),
    [({"prompt": "hi"}, True), ({"prompt": "é" * 3000}, False), ({"prompt": ["a"] * 1024}, False)],
)
def test_prompts_of_a_small_body_are_encoded_on_the_event_loop_and_others_beside_it(
    harness, monkeypatch, fields, is_on_loop
):
    app, places, encode_checked = harness("hi"), [], Tokenizer.encode_checked

    def watched(self, *args, **kwargs):
        places.append(is_in_loop())
        return encode_checked(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode_checked", watched)
    assert app.complete(**{"max_tokens": 1, **fields}).status_code in (200, 400, 429)  # many may be too many
    assert places == [is_on_loop]


@pytest.mark.parametrize("is_late", [True, False], ids=["too late", "cancelled"])
def test_a_render_that_fails_after_its_request_ended_is_not_reported_as_lost(model_folder, monkeypatch, is_late):
    reports, begun, go_on, ended = [], threading.Event(), threading.Event(), threading.Event()

    def render_chat(*_: object, **__: object) -> None:
        begun.set()
        go_on.wait(60)
        ended.set()
        raise RuntimeError("nobody is there")

    async def abandon() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reports.append(context["message"]))
        body = parse_body(ChatBody, {"messages": [{"role": "user", "content": "hi"}]})
        request = asyncio.create_task(encode_chat(app_state, body, of_client))
        if not is_late:
            await asyncio.to_thread(begun.wait, 60)
            request.cancel()
        with pytest.raises(InvalidParameter if is_late else asyncio.CancelledError):
            await request
        del request
        go_on.set()
        await asyncio.to_thread(ended.wait, 60)
        await asyncio.sleep(0.05)
        gc.collect()

    monkeypatch.setattr("server.api.chat.request._RENDER_WAIT_S", 0.01 if is_late else 60.0)
    monkeypatch.setattr("server.text.tokenizer.Tokenizer.render_chat", render_chat)
    app_state = SimpleNamespace(tokenizer=load_tokenizer(model_folder), limits=lambda: READY, work=HeavyWork())
    of_client = Request({"type": "http"})
    give_place(of_client.scope, LargeBodies(app_state.work)).add(LIMITS.brief_bytes + 1)
    asyncio.run(abandon())
    assert reports == []
