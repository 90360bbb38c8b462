"""Scores of prompts in the answers: OpenAI's echo with logprobs, as lm-eval reads it, and vLLM's prompt_logprobs.

The fake engine scores token t with -t/1000, and the next ids are its alternatives.
"""

import msgspec
import pytest

from server.config.model_source import DEMO_FOLDER
from server.http.routes import reply as answer
from tests.support.fakes import READY
from tests.unit.server.conftest import check_error, stream_chunks

PROMPT = "Schöne Grüße 日本"


def score(token_id: int) -> float:
    return -token_id / 1000


# rule: Fields: `echo` acts, also with `logprobs`
def test_echo_with_logprobs_covers_the_whole_text(harness):
    app = harness("Hello, world!")
    (choice,) = app.complete(prompt=PROMPT, echo=True, logprobs=2, max_tokens=2).json()["choices"]
    ids = app.ids(PROMPT) + app.ids("Hello, world!")[:2]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert logprobs["token_logprobs"] == [None, *map(score, ids[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert app.client.submitted[0].params.prompt_logprobs == 2
    data = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in logprobs["tokens"]
    )
    assert data.decode() == choice["text"]
    for place, token in enumerate(logprobs["tokens"]):
        if not token.startswith("bytes:"):
            offset = logprobs["text_offset"][place]
            assert choice["text"][offset : offset + len(token)] == token
    for token, value, tops in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert tops[token] == value  # bit-equal
        assert max(tops.values()) == value


@pytest.mark.parametrize("skips", [True, False])
def test_control_tokens_that_an_echo_shows_count_in_its_offsets(harness, skips):
    app = harness("Hello", folder=DEMO_FOLDER, engine={"ready": msgspec.structs.replace(READY, vocab_size=6144)})
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    fields = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skips}
    (choice,) = app.complete(**fields).json()["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert logprobs["tokens"][0] == "<|im_start|>"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


def test_lm_eval_scores_a_continuation_of_ids(harness):
    app = harness("Hello")
    context, continuation = app.ids("The quick brown"), app.ids(" fox jumps")
    body = {"prompt": [context + continuation], "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choice = app.complete(**body, temperature=0).json()["choices"][0]
    shown = choice["logprobs"]["token_logprobs"][len(context) : -1]
    assert shown == [score(id_) for id_ in continuation]
    assert len(choice["logprobs"]["tokens"]) == len(context) + len(continuation) + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("logprobs", "n"), [(None, 1), (1, 1), (0, 2)])
def test_no_tokens_asked_for_are_no_tokens_given(harness, stream, logprobs, n):
    app = harness("Hello", engine={"num_cached_tokens": 3})
    fields = {"prompt": ["ab", PROMPT], "echo": True, "logprobs": logprobs, "max_tokens": 0, "n": n}
    if stream:
        chunks = stream_chunks(app.complete(**fields, stream=True, stream_options={"include_usage": True}).text)
        usage = chunks[-1]["usage"]
        choices: dict[int, dict] = {}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            seen = choices.setdefault(choice["index"], {"text": "", "tokens": [], "finish_reason": None})
            seen["text"] += choice["text"]
            seen["tokens"] += choice["logprobs"]["tokens"] if choice["logprobs"] else []
            seen["finish_reason"] = choice["finish_reason"] or seen["finish_reason"]
    else:
        body = app.complete(**fields).json()
        usage = body["usage"]
        choices = {c["index"]: {**c, "tokens": (c["logprobs"] or {"tokens": []})["tokens"]} for c in body["choices"]}
        assert body["timings"]["prefill_ms"] is not None
        assert body["timings"]["itl_ms"] is None
    assert sorted(choices) == list(range(2 * n))
    for index, choice in choices.items():
        prompt = ("ab", PROMPT)[index // n]
        assert choice["text"] == prompt
        assert choice["finish_reason"] == "length"
        assert len(choice["tokens"]) == (len(app.ids(prompt)) if logprobs is not None else 0)
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6


def test_a_streamed_echo_is_the_plain_one_in_pieces(harness):
    app = harness("Hello, world!")
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "return_token_ids": True}
    (whole,) = app.complete(**fields).json()["choices"]
    chunks = stream_chunks(app.complete(**fields, stream=True).text)
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [id_ for piece in pieces for id_ in piece.get("token_ids", [])] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [v for p in pieces if p["logprobs"] for v in p["logprobs"][name]] == whole["logprobs"][name]


def test_prompt_logprobs_are_vllms_on_both_routes(harness):
    app = harness("Hello")
    ids = app.ids("The quick brown fox")
    body = app.complete(prompt="The quick brown fox", prompt_logprobs=2).json()
    shown = body["choices"][0]["prompt_logprobs"]
    assert shown[0] is None
    for token_id, entry in zip(ids[1:], shown[1:], strict=True):
        text = app.tokenizer.decode([token_id])
        assert entry[str(token_id)] == {"logprob": score(token_id), "rank": token_id % 10, "decoded_token": text}
        assert entry[str(token_id + 1)]["rank"] == 2
    chat = app.chat(prompt_logprobs=0).json()
    assert [list(entry or ()) for entry in chat["prompt_logprobs"]] == [
        [], *([str(id_)] for id_ in app.client.submitted[-1].prompt_token_ids[1:])
    ]  # fmt: skip
    assert "prompt_logprobs" not in app.chat().json()
    assert "prompt_logprobs" not in app.complete().json()["choices"][0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"), ({"logprobs": 21, "echo": True}, "logprobs"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(harness, fields, param):
    assert check_error(harness().complete(**fields), 400, "invalid_parameter")["param"] == param


def test_many_scores_are_written_beside_the_loop_and_are_the_same(harness, monkeypatch):
    app = harness("Hello")
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    few = app.complete(**fields).json()["choices"]
    monkeypatch.setattr(answer, "MANY_SCORES", 0)
    assert app.complete(**fields).json()["choices"] == few


def test_max_tokens_of_nothing_is_for_completions_alone(harness):
    assert (
        check_error(harness().chat(max_tokens=0, prompt_logprobs=1), 400, "invalid_parameter")["param"] == "max_tokens"
    )
    body = harness().complete(max_tokens=0, prompt_logprobs=1).json()
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["completion_tokens"] == 0
