"""The HTTP contract on a fake engine: answers, streams, errors on every path, readiness."""

import asyncio
import json
import logging

import msgspec
import pytest

from engine.control import Stage, State
from engine.errors import EngineDead, EngineError, Overloaded, ShuttingDown
from server.tokenizer import Tokenizer
from tests.fakes import FakeSupervisor
from tests.unit.server.conftest import (
    CHAT,
    COMPLETIONS,
    USER_HI,
    check_error,
    stream_chunks,
    write_model_folder,
)

TEXT = "Schöne Grüße, 日本語 😀👍🏽!"


def chat_text(chunks, index=0):
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


# --- answers


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
    }
    assert set(body["timings"]) == {"queue_ms", "prefill_ms", "ttft_ms", "itl_ms", "total_ms"}
    assert app.tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


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


def test_a_stream_has_the_headers_that_proxies_need(harness):
    headers = harness().chat(stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-accel-buffering"] == "no"
    assert "no-cache" in headers["cache-control"]
    assert "content-length" not in headers


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


def test_logprobs_have_openais_form(harness):
    app = harness("é!")
    body = app.chat(logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é!"
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)


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


def test_completions_take_all_four_forms_of_a_prompt(harness):
    app = harness("Hello")
    ids = app.ids("Hello")
    for prompt, num_choices in (("Hello", 1), (["Hello", "Hello"], 2), (ids, 1), ([ids, ids], 2)):
        app.client.submitted.clear()
        body = app.complete(prompt=prompt).json()
        assert body["object"] == "text_completion"
        assert [choice["index"] for choice in body["choices"]] == list(range(num_choices))
        assert all(request.prompt_token_ids == ids for request in app.client.submitted)


@pytest.mark.parametrize("prompt", ["Say: ", [300, 301]])
def test_echo_puts_the_prompt_first(harness, prompt):
    app = harness("Hello")
    text = prompt if isinstance(prompt, str) else app.tokenizer.decode(prompt)
    assert app.complete(prompt=prompt, echo=True).json()["choices"][0]["text"] == text + "Hello"
    chunks = stream_chunks(app.complete(prompt=prompt, echo=True, stream=True).text)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text + "Hello"


def test_token_ids_are_returned_when_asked_for(harness):
    app = harness("Hello, world!")
    for body in (app.chat(return_token_ids=True).json(), app.complete(return_token_ids=True).json()):
        choice = body["choices"][0]
        assert choice["token_ids"] == app.ids("Hello, world!")
        prompt_ids = body.get("prompt_token_ids", choice.get("prompt_token_ids"))
        assert prompt_ids in [request.prompt_token_ids for request in app.client.submitted]
    chunks = stream_chunks(app.chat(return_token_ids=True, stream=True).text)
    assert [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", [])] == app.ids("Hello, world!")


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


def test_every_served_name_is_a_model(harness):
    app = harness()
    assert [card["id"] for card in app.get("/v1/models").json()["data"]] == ["tiny", "alias/tiny"]
    card = app.get("/v1/models/alias/tiny").json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("alias/tiny", "model", 256)
    assert app.chat(model="alias/tiny").json()["model"] == "alias/tiny"
    assert app.chat(model=None).json()["model"] == "tiny"


# --- errors


JSON_TYPE = {"content-type": "application/json"}


def test_errors_have_openais_form_on_every_path(harness):
    app = harness(max_body_bytes=1000)
    check_error(app.get("/nothing"), 404, "not_found")
    check_error(app.get("/v1/models/"), 404, "model_not_found")
    check_error(app.get("/v1/models/gpt-4"), 404, "model_not_found")
    check_error(app.chat(model="gpt-4"), 404, "model_not_found")
    check_error(app.get(CHAT), 405, "method_not_allowed")
    assert app.get(CHAT).headers["allow"] == "POST"
    check_error(app.post("/health"), 405, "method_not_allowed")
    check_error(app.chat(user="x" * 2000), 413, "body_too_large")
    check_error(app.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415, "unsupported_media_type")
    check_error(app.post(CHAT, content=b"{}"), 415, "unsupported_media_type")
    check_error(app.post(CHAT, content=b"{nope", headers=JSON_TYPE), 400, "malformed_json")
    check_error(app.post(CHAT, content=b'{"temperature": NaN}', headers=JSON_TYPE), 400, "malformed_json")
    check_error(app.post(CHAT, content=b'{"user": "\\ud800"}', headers=JSON_TYPE), 400, "malformed_json")
    check_error(app.post(CHAT, content=b"[" * 900, headers=JSON_TYPE), 400, "malformed_json")
    assert check_error(app.chat(n="3"), 400, "invalid_parameter")["param"] == "n"
    assert check_error(app.chat(tools=[{}]), 400, "unsupported_feature")["param"] == "tools"
    assert check_error(app.complete(suffix="x"), 400, "unsupported_feature")["param"] == "suffix"
    assert app.client.submitted == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_a_400_also_for_a_stream(harness, stream):
    error = check_error(harness().chat(max_tokens=4000, stream=stream), 400, "context_length_exceeded")
    assert "256" in error["message"]
    assert "4000" in error["message"]


def test_a_hopelessly_long_prompt_is_not_encoded_whole(harness, monkeypatch):
    app = harness(max_body_bytes=2**30)
    encoded = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **kw: encoded.append(len(text)) or encode(self, text, **kw)
    )
    text = "Hello, world! " * 10_000
    error = check_error(app.complete(prompt=text), 400, "context_length_exceeded")
    assert error["param"] == "prompt"
    error = check_error(app.chat(messages=[{"role": "user", "content": text}]), 400, "context_length_exceeded")
    assert error["param"] == "messages"
    assert max(encoded) == 16 * 256


def test_a_body_without_length_is_refused_while_it_is_read(harness):
    async def chunks():
        for _ in range(100):
            yield b" " * 100
        pytest.fail("the whole body was read")

    app = harness(max_body_bytes=1000)
    check_error(app.post(CHAT, content=chunks(), headers=JSON_TYPE), 413, "body_too_large")


@pytest.mark.parametrize("text", ["x" * 10_000, "\x00\x1b" * 600, "😀" * 2000, '"\\' * 2000])
def test_error_bodies_stay_small_whatever_they_quote(harness, text):
    check_error(harness().chat(messages=[{"role": "user", "content": [{"type": text}]}]), 400, "unsupported_feature")
    check_error(harness().chat(**{text: 1}, n=0), 400, "invalid_parameter")
    check_error(harness(strict=True).chat(**{text: 1}), 400, "invalid_parameter")
    check_error(harness().chat(model=text[:500]), 404, "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "retry_after"),
    [
        (Overloaded("full", retry_after_s=7), 429, "7"),
        (EngineDead("gone"), 503, "2"),
        (ShuttingDown("Bye."), 503, "2"),
        (EngineError("bad"), 500, None),
    ],
)
def test_failures_before_the_first_byte_are_statuses(harness, stream, failure, status, retry_after):
    reply = harness(engine={"fail": failure}).chat(stream=stream)
    check_error(reply, status, failure.code)
    assert reply.headers.get("retry-after") == retry_after


def test_a_failure_after_the_first_byte_is_an_event_before_done(harness):
    reply = harness(engine={"fail": EngineDead("gone"), "fail_after": 3}).chat(stream=True)
    chunks = stream_chunks(reply.text)
    assert chunk_error(chunks[-1])["code"] == "engine_dead"
    assert chat_text(chunks[:-1])
    assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])


def chunk_error(chunk):
    assert list(chunk) == ["error"]
    return chunk["error"]


def test_an_unexpected_error_is_generic_and_names_the_request(harness, caplog):
    app = harness(engine={"script": lambda request: 1 / 0})
    for reply in (app.chat(), app.chat(stream=True)):
        error = check_error(reply, 500, "internal_error")
        assert reply.headers["x-request-id"] in error["message"]
        assert "division" not in reply.text


def test_an_unexpected_error_in_a_stream_is_an_event(harness):
    app = harness(engine={"fail": ZeroDivisionError("secret"), "fail_after": 2})
    text = app.chat(stream=True).text
    assert chunk_error(stream_chunks(text)[-1])["code"] == "internal_error"
    assert "secret" not in text


class _OneTokenThenSilence:
    def __init__(self) -> None:
        self._has_passed = False

    async def wait(self) -> None:
        if self._has_passed:
            await asyncio.sleep(60)
        self._has_passed = True


def test_the_requests_own_deadline(harness):
    app = harness(engine={"delay_s": 5})
    assert "0.05 s" in check_error(app.chat(timeout=0.05), 408, "deadline_exceeded")["message"]
    assert len(app.client.aborted) == 1
    assert "0.001 s" in check_error(app.chat(timeout=0.001), 408, "deadline_exceeded")["message"]
    app = harness(engine={"hold": _OneTokenThenSilence()}, request_timeout_s=0.3)
    chunks = stream_chunks(app.chat(stream=True).text)
    assert chunk_error(chunks[-1])["code"] == "deadline_exceeded"


def test_request_ids_are_echoed_if_safe(harness):
    app = harness()
    assert (
        app.post(CHAT, {"messages": USER_HI}, headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    )
    for unsafe in ("a b", "x" * 129, "é".encode(), ""):
        made = app.post(CHAT, {"messages": USER_HI}, headers={"x-request-id": unsafe}).headers["x-request-id"]
        assert made.startswith("req-")


def test_a_model_without_template_answers_completions_only(harness, tmp_path):
    app = harness(folder=write_model_folder(tmp_path, chat_template=None))
    error = check_error(app.chat(), 400, "unsupported_feature")
    assert "/v1/completions" in error["message"]
    assert app.complete().status_code == 200


# --- what is counted and logged


def test_rejections_are_counted_by_reason(harness):
    app = harness(supervisor=(supervisor := FakeSupervisor()))
    app.chat(n=0)
    app.post("/nothing", {})
    supervisor.state = State(Stage("ready"), True)
    app.chat()
    supervisor.state = State(Stage("weights"), False)
    app.chat()
    counters = app.metrics.drain().counters
    assert counters["requests_rejected_total", "invalid"] == 2
    assert counters["requests_rejected_total", "draining"] == 1
    assert counters["requests_rejected_total", "not_ready"] == 1


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


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
        "{% for i in range(9000) %}{% for j in range(200) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_runs_too_long_is_a_400(harness, tmp_path, monkeypatch, source):
    """Whether it writes something meanwhile or not."""
    monkeypatch.setattr("server.tokenizer.TEMPLATE_DEADLINE_S", 0.01)
    monkeypatch.setattr("server.routes.chat.TEMPLATE_DEADLINE_S", 0.01)
    monkeypatch.setattr("server.routes.chat._RENDER_GRACE_S", 0.01)
    app = harness(folder=write_model_folder(tmp_path, chat_template=source))
    assert "2 s" in check_error(app.chat(), 400, "invalid_parameter")["message"]
