"""What a client hears when something is wrong: on every path, before and after the first byte."""

import pytest

from engine.interface.errors import EngineDead, EngineError, ModelOutputInvalid, OutOfMemory, Overloaded, ShuttingDown
from server.text.tokenizer import Tokenizer
from tests.unit.server.conftest import (
    CHAT,
    USER_HI,
    TooLateAfterOneToken,
    chat_text,
    check_error,
    stream_chunks,
    write_model_folder,
)

TEXT = "Schöne Grüße, 日本語 😀👍🏽!"

JSON_TYPE = {"content-type": "application/json"}


# rule: Fields: `model` is a served name, or absent
# rule: Errors: Every path answers errors in OpenAI's form as JSON; Anthropic's paths in Anthropic's
# rule: Errors: 404 for models and routes, 405 with `Allow`, 413, 415
# rule: Errors: `x-should-retry: false` where another try would fail as well
def test_errors_have_openais_form_on_every_path(harness):
    app = harness(max_body_bytes=1000)
    check_error(app.get("/nothing"), 404, "not_found")
    check_error(app.get("/v1/models/"), 404, "not_found")
    check_error(app.get("/v1/models/gpt-4"), 404, "model_not_found")
    check_error(app.chat(model="gpt-4"), 404, "model_not_found")
    check_error(app.get(CHAT), 405, "method_not_allowed")
    assert app.get(CHAT).headers["allow"] == "POST"
    check_error(app.post("/health"), 405, "method_not_allowed")
    check_error(app.chat(user="x" * 2000), 413, "body_too_large")
    check_error(app.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415, "unsupported_media_type")
    check_error(app.post(CHAT, content=b"{}"), 415, "unsupported_media_type")
    gzipped = {**JSON_TYPE, "content-encoding": "gzip"}
    check_error(app.post(CHAT, content=b"\x1f\x8b", headers=gzipped), 415, "unsupported_media_type")
    check_error(app.post(CHAT, content=b"{nope", headers=JSON_TYPE), 400, "malformed_json")
    check_error(app.post(CHAT, content=b'{"temperature": NaN}', headers=JSON_TYPE), 400, "malformed_json")
    check_error(app.post(CHAT, content=b'{"user": "\\ud800"}', headers=JSON_TYPE), 400, "malformed_json")
    check_error(app.post(CHAT, content=b"[" * 900, headers=JSON_TYPE), 400, "malformed_json")
    assert check_error(app.chat(n="3"), 400, "invalid_parameter")["param"] == "n"
    assert (
        check_error(app.chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "unsupported_feature")[
            "param"
        ]
        == "tools"
    )
    assert check_error(app.complete(suffix="x"), 400, "unsupported_feature")["param"] == "suffix"
    assert app.client.submitted == []


# rule: Errors: A prompt that is too long is a 400 before any stream
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
    assert encoded == []


# rule: Errors: 404 for models and routes, 405 with `Allow`, 413, 415
# rule: Limits: Body 8 MiB, refused while it arrives
def test_a_body_without_length_is_refused_while_it_is_read(harness):
    async def chunks():
        for _ in range(100):
            yield b" " * 100
        pytest.fail("the whole body was read")

    app = harness(max_body_bytes=1000)
    check_error(app.post(CHAT, content=chunks(), headers=JSON_TYPE), 413, "body_too_large")


# rule: Errors: An error body is under 4 KB, whatever it quotes
@pytest.mark.parametrize("text", ["x" * 10_000, "\x00\x1b" * 600, "😀" * 2000, '"\\' * 2000])
def test_error_bodies_stay_small_whatever_they_quote(harness, text):
    check_error(harness().chat(messages=[{"role": "user", "content": [{"type": text}]}]), 400, "unsupported_feature")
    check_error(harness().chat(**{text: 1}, n=0), 400, "invalid_parameter")
    check_error(harness(strict=True).chat(**{text: 1}), 400, "invalid_parameter")
    check_error(harness().chat(model=text[:500]), 404, "model_not_found")


# rule: Errors: 429 and 503 with `Retry-After`
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "retry_after"),
    [
        (Overloaded("full", retry_after_s=7), 429, "7"),
        (EngineDead("gone"), 503, "2"),
        (ShuttingDown("Bye."), 503, "2"),
        (OutOfMemory("Full."), 503, "2"),
        (EngineError("bad"), 500, None),
        (ModelOutputInvalid("The model's output is not finite."), 500, None),
    ],
)
def test_failures_before_the_first_byte_are_statuses(harness, stream, failure, status, retry_after):
    reply = harness(engine={"fail": failure}).chat(stream=stream)
    check_error(reply, status, failure.code)
    assert reply.headers.get("retry-after") == retry_after


# rule: Streams: A failure after the first byte is an event, then `[DONE]`; a stream is never just closed
def test_a_failure_after_the_first_byte_is_an_event_before_done(harness):
    reply = harness(engine={"fail": EngineDead("gone"), "fail_after": 3}).chat(stream=True)
    chunks = stream_chunks(reply.text)
    assert chunk_error(chunks[-1])["code"] == "engine_dead"
    assert chat_text(chunks[:-1])
    assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])


def chunk_error(chunk):
    assert list(chunk) == ["error"]
    return chunk["error"]


# rule: Errors: 500 says no more than the request's id
def test_an_unexpected_error_is_generic_and_names_the_request(harness, caplog):
    app = harness(engine={"script": lambda request: 1 / 0})
    for reply in (app.chat(), app.chat(stream=True)):
        error = check_error(reply, 500, "internal_error")
        assert reply.headers["x-request-id"] in error["message"]
        assert "division" not in reply.text


# rule: Errors: 500 says no more than the request's id
def test_an_unexpected_error_in_a_stream_is_an_event(harness):
    app = harness(engine={"fail": ZeroDivisionError("secret"), "fail_after": 2})
    text = app.chat(stream=True).text
    assert chunk_error(stream_chunks(text)[-1])["code"] == "internal_error"
    assert "secret" not in text


# rule: Errors: 408 when the request's time is over, or its sender is too slow
def test_the_requests_own_deadline(harness, monkeypatch):
    app = harness(engine={"delay_s": 5})
    assert "0.05 s" in check_error(app.chat(timeout=0.05), 408, "deadline_exceeded")["message"]
    assert len(app.client.aborted) == 1
    assert "0.001 s" in check_error(app.chat(timeout=0.001), 408, "deadline_exceeded")["message"]
    app = harness(engine={"hold": TooLateAfterOneToken(monkeypatch)}, request_timeout_s=600)
    chunks = stream_chunks(app.chat(stream=True).text)
    assert chunk_error(chunks[-1])["code"] == "deadline_exceeded"


# rule: Errors: `x-request-id` comes back if it is safe, else a new one
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
