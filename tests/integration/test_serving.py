"""The whole house answers the real OpenAI client: chat and completions, streamed and plain, one and many at once."""

import asyncio
import re
import socket
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from server.config.model_source import DEMO_FOLDER
from tests.support.daemon import Daemon, wait_for

MODEL = "quire-demo"
TOKENIZER = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))


def chat_prompt_length(text: str) -> int:
    """Return how many tokens a chat of one user message has, counted without the server."""
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return len(TOKENIZER.encode(prompt).ids)


def chat(text: str, *, max_tokens: int = 12, **more: object) -> dict[str, object]:
    """Return the arguments of a greedy chat request that ends by its length."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": max_tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
        **more,
    }


def test_ready_health_version_and_models_answer(daemon: Daemon, client: openai.OpenAI) -> None:
    assert daemon.get("/health").status_code == 200
    assert daemon.get("/ready").json()["stage"] == "ready"
    assert daemon.get("/version").json()["version"]
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


# rule: Streams: The chunks joined are the whole answer
def test_chat_stream_is_the_plain_answer_in_pieces(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**chat("What is a page?"))
    chunks = list(
        client.chat.completions.create(**chat("What is a page?", stream=True, stream_options={"include_usage": True}))
    )
    assert plain.choices[0].message.role == "assistant"
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage.prompt_tokens == chat_prompt_length("What is a page?")
    assert plain.usage.completion_tokens == 12
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert content == plain.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_stream_is_the_plain_answer_in_pieces(client: openai.OpenAI) -> None:
    ask = {
        "model": MODEL,
        "prompt": "Once upon",
        "max_tokens": 10,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    plain = client.completions.create(**ask)
    streamed = client.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == plain.choices[0].text
    assert plain.usage.prompt_tokens == len(TOKENIZER.encode("Once upon").ids)
    assert plain.usage.completion_tokens == 10


# rule: Fields: A seed gives the same answer again
def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    answers = {
        client.chat.completions.create(**chat("Say something", temperature=1.0, seed=seed)).choices[0].message.content
        for seed in (7, 7, 7)
    }
    assert len(answers) == 1


def test_sixty_four_streams_at_once_have_exact_usage_and_their_own_text(daemon: Daemon, client: openai.OpenAI) -> None:
    before = daemon.metrics()

    async def one(many: openai.AsyncOpenAI, index: int) -> tuple[str, openai.types.CompletionUsage]:
        text, usage = "", None
        stream = await many.chat.completions.create(
            **chat(f"Question {index}", max_tokens=8 + index % 9, stream=True, stream_options={"include_usage": True})
        )
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
        assert usage is not None
        return text, usage

    async def all_at_once() -> list[tuple[str, openai.types.CompletionUsage]]:
        async with openai.AsyncOpenAI(base_url=f"{daemon.base_url}/v1", api_key="-", max_retries=0) as many:
            return await asyncio.gather(*(one(many, index) for index in range(64)))

    answers = asyncio.run(all_at_once())
    for index, (_, usage) in enumerate(answers):
        assert usage.prompt_tokens == chat_prompt_length(f"Question {index}")
        assert usage.completion_tokens == 8 + index % 9
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    after = daemon.metrics()
    assert after["quire_generation_tokens_total"] - before["quire_generation_tokens_total"] == sum(
        usage.completion_tokens for _, usage in answers
    )
    assert after["quire_prompt_tokens_total"] - before["quire_prompt_tokens_total"] == sum(
        usage.prompt_tokens for _, usage in answers
    )
    name = "quire_requests_finished_total{finished_reason=length}"
    assert after[name] - before[name] == 64
    for index in range(0, 64, 9):
        alone = client.chat.completions.create(**chat(f"Question {index}", max_tokens=8 + index % 9))
        assert alone.choices[0].message.content == answers[index][0]


# rule: Fields: `n` gives as many choices, each drawn on its own
def test_several_choices_are_answered_and_counted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat("Hello", max_tokens=5, n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 15


# rule: Fields: `stop` ends an answer, also where it spans chunks
def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**chat("Tell me", max_tokens=24)).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    answer = client.chat.completions.create(**chat("Tell me", max_tokens=24, stop=[stop])).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content == whole[: whole.index(stop)]


def test_a_stop_string_is_counted_before_its_answer_can_be_followed_by_a_scrape(
    daemon: Daemon, client: openai.OpenAI
) -> None:
    """The engine learns of the stop string from the worker; the metrics must not be faster, however long its steps."""
    whole = client.chat.completions.create(**chat("Tell me", max_tokens=24)).choices[0].message.content
    body = {**chat("Tell me", max_tokens=2000, stop=[whole[3:5]]), "extra_body": None, "ignore_eos": True}
    before = daemon.metrics()["quire_requests_finished_total{finished_reason=stop}"]
    with (
        httpx.Client(base_url=daemon.base_url) as http,  # one for all, since a new one would take its time
        client.chat.completions.create(**chat("Keep it busy", max_tokens=3000, n=8, stream=True)),
    ):
        for i in range(1, 31):
            assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["finish_reason"] == "stop"
            page = http.get("/metrics").text
            (line,) = (line for line in page.splitlines() if re.match(r'quire_requests_finished.*"stop"', line))
            assert float(line.split()[-1]) - before == i


# rule: Errors: A client that leaves ends its request, stream or not
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_every_block(daemon: Daemon, stream: bool) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Never stop"}],
        "max_tokens": 3500,
        "ignore_eos": True,
        "stream": stream,
    }
    with socket.create_connection(_address(daemon), timeout=60) as connection:
        payload = httpx.Request("POST", daemon.base_url + "/v1/chat/completions", json=body)
        head = "".join(f"{key}: {value}\r\n" for key, value in payload.headers.items())
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + payload.content)
        wait_for(lambda: daemon.metrics()["quire_kv_cache_blocks_used"] > 0, timeout_s=60, what="blocks in use")
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    wait_for(lambda: daemon.metrics()["quire_kv_cache_blocks_used"] == 0, timeout_s=60, what="blocks freed")
    metrics = daemon.metrics()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert metrics["vllm:num_requests_running"] == 0
    assert metrics["quire_requests_finished_total{finished_reason=abort}"] >= 1


# rule: Fields: Usage always counts cached tokens
def test_the_prefix_cache_is_hit_by_a_repeated_prompt(daemon: Daemon, client: openai.OpenAI) -> None:
    text = "A long question that fills more than one block. " * 8
    first = client.chat.completions.create(**chat(text, max_tokens=4))
    hits = daemon.metrics()["quire_prefix_cache_hits_total"]
    second = client.chat.completions.create(**chat(text, max_tokens=4))
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 32
    assert daemon.metrics()["quire_prefix_cache_hits_total"] - hits == second.usage.prompt_tokens_details.cached_tokens


# rule: Fields: A header says why no more of the prompt was cached, and `cache` in chats and completions
def test_answers_say_why_no_more_of_their_prompt_was_cached(client: openai.OpenAI) -> None:
    def ask(text: str, **body: object) -> tuple[dict, str]:
        fields = chat(text, max_tokens=2) | {"extra_body": body}
        reply = client.chat.completions.with_raw_response.create(**fields)
        return reply.parse().model_extra["cache"], reply.headers["x-quire-cache"]

    text = "Another long question, for which nobody asked before. " * 8
    first, _ = ask(text)
    assert first["reason"] in ("new", "differs")  # other tests share the daemon
    again, header = ask(text)
    assert again["reason"] == "all"
    assert header == f"all;cached={again['cached_tokens']};matched={again['matched_tokens']}"
    assert again["matched_tokens"] == again["cached_tokens"] > first["cached_tokens"]
    longer, _ = ask(text + "And more of it, at least as many tokens as a block has, and one. " * 2)
    assert longer["reason"] in ("new", "differs")
    assert longer["kind"] == "full"
    assert longer["cached_tokens"] >= 64
    salted, _ = ask(text, cache_salt="mine")
    assert salted == {"reason": "other_salt", "cached_tokens": 0, "matched_tokens": 0, "kind": "full"}
    assert ask("x", cache_salt="nobody's")[0]["reason"] != "other_salt"
    assert ask(text, prompt_logprobs=0)[0]["reason"] == "computed_whole"


def test_a_stream_has_the_reason_in_its_header_and_its_last_chunk(client: openai.OpenAI) -> None:
    fields = chat("A streamed question that fills more than one block. " * 8, max_tokens=2)
    client.chat.completions.create(**fields)
    with client.chat.completions.with_streaming_response.create(**fields, stream=True) as reply:
        *_, last = reply.parse()
        assert last.model_extra["cache"]["reason"] == "all"
        assert reply.headers["x-quire-cache"].startswith("all;")


# rule: Errors: 400 for a wrong field, with its name
@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": "hello"}, 400, "messages"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 100_000}, 400, "n"),
        ({"n": True}, 400, "n"),
        ({"max_tokens": 1_000_000}, 400, "4096"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "4096"),
        ({"messages": [{"role": "user", "content": "word " * 9000}], "stream": True}, 400, "4096"),
    ],
)
def test_a_bad_request_is_an_openai_error_that_names_its_field(
    daemon: Daemon, change: dict[str, object], status: int, words: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **change}
    response = httpx.post(daemon.base_url + "/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"temperature": NaN}', b"\xff\xfe", b'{"model": 1e999}', b"[" * 100_000],
)
def test_malformed_json_is_a_400(daemon: Daemon, content: bytes) -> None:
    response = httpx.post(
        daemon.base_url + "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_headers_beyond_the_limit_are_refused_and_hurt_nobody(daemon: Daemon) -> None:
    with socket.create_connection(_address(daemon), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 200_000)
        assert b" 4" in connection.recv(100)
    assert daemon.get("/health").status_code == 200


def test_the_folder_that_transformers_saved_gives_transformers_greedy_text(tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=2,
        )
    )
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompt = "The quick brown fox jumps"
    inputs = tokenizer(prompt, return_tensors="pt")
    expected = tokenizer.decode(
        model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :],
        skip_special_tokens=True,
    )
    with Daemon(str(folder), "--device", "cpu", "--dtype", "float32", folder=tmp_path) as daemon:
        answer = httpx.post(
            daemon.wait_ready().base_url + "/v1/completions",
            json={"model": "saved", "prompt": prompt, "max_tokens": 40, "temperature": 0},
            timeout=60,
        )
    assert answer.json()["choices"][0]["text"] == expected


def test_a_request_is_answered_soon_after_a_burst_of_bad_ones(daemon: Daemon, client: openai.OpenAI) -> None:
    for _ in range(50):
        httpx.post(daemon.base_url + "/v1/chat/completions", content=b"{", timeout=60)
    # within the client's timeout: it answers at all; how fast is a benchmark's business
    assert client.chat.completions.create(**chat("Still there?", max_tokens=2)).usage.completion_tokens == 2


def _address(daemon: Daemon) -> tuple[str, int]:
    url = httpx.URL(daemon.base_url)
    return url.host, url.port or 80
