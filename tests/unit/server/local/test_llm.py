"""from quire import LLM: the API's fields, answers and errors, without a server."""

import asyncio
import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest

from engine.interface.errors import InvalidParameter, PromptTooLong, StartupError, UnsupportedFeature
from quire import LLM, Answer
from server.local.settings import read_settings

QUESTION = "What is a quire?"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_model_len=512, max_num_seqs=4, pooling="mean") as loaded:
        yield loaded


def test_a_question_is_answered_as_text_with_its_counts(llm: LLM) -> None:
    answer = llm.chat(QUESTION, temperature=0)
    assert str(answer) == answer.text
    assert "pages" in answer.text
    assert answer.finish_reason == "stop"
    assert answer.num_prompt_tokens > 5
    assert llm.chat([{"role": "user", "content": QUESTION}], temperature=0).text == answer.text


def test_lists_keep_their_order_and_equal_single_prompts(llm: LLM) -> None:
    prompts = [f"{word} is" for word in ("A quire", "Paris", "A token", "The cache", "A page", "Python")] * 3
    answers = llm.generate(prompts, max_tokens=5, temperature=0)
    alone = [llm.generate(prompt, max_tokens=5, temperature=0).text for prompt in prompts[:6]]
    assert [answer.text for answer in answers] == alone * 3
    assert all(isinstance(answer, Answer) and answer.error is None for answer in answers)
    chats = [[{"role": "user", "content": text}] for text in (QUESTION, "Hello")]
    assert [answer.text for answer in llm.chat(chats, temperature=0, max_tokens=8)] == [
        llm.chat(chat, temperature=0, max_tokens=8).text for chat in chats
    ]


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    (answer,) = llm.generate([[5, 6, 7]], max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    assert (answer.num_prompt_tokens, len(answer.token_ids), answer.finish_reason) == (3, 3, "length")
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 3
    assert llm.generate([5, 6, 7], max_tokens=3, temperature=0, ignore_eos=True).token_ids == answer.token_ids
    with pytest.raises(InvalidParameter, match="prompt"):
        llm.generate(["a", 3])  # type: ignore[list-item]


def test_a_stream_is_the_answer_in_pieces_and_may_be_left(llm: LLM) -> None:
    pieces = list(llm.chat(QUESTION, temperature=0, stream=True))
    assert len(pieces) > 3
    assert "".join(pieces) == llm.chat(QUESTION, temperature=0).text
    left = llm.generate("Once", max_tokens=400, ignore_eos=True, stream=True)
    assert list(itertools.islice(left, 2))
    left.close()  # type: ignore[attr-defined]
    assert "".join(llm.chat(QUESTION, temperature=0, stream=True)) == "".join(pieces)


def test_structured_output_and_embeddings(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    json_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert set(json.loads(llm.chat("A number", response_format=json_schema, max_tokens=40).text)) == {"n"}
    vectors = llm.embed(["a quire", "a page"])
    assert vectors.shape[0] == 2
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(llm.embed("a page"), vectors[1], atol=1e-5)


def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    async def cell() -> str:
        return llm.chat(QUESTION, temperature=0, max_tokens=4).text  # as a notebook's cell does

    assert asyncio.run(cell())


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"temperature": 9}, InvalidParameter, "temperature should be less than or equal to 2, got 9"),
        ({"warmth": 1}, InvalidParameter, "The field warmth is unknown"),
        ({"n": 2}, InvalidParameter, "n is a field of HTTP requests alone"),
        ({"max_tokens": 10_000}, PromptTooLong, "512 tokens"),
    ],
)
def test_wrong_fields_are_named_as_by_the_server(
    llm: LLM, fields: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        llm.chat("Hi", **fields)
    with pytest.raises(error, match=words):
        llm.chat([[{"role": "user", "content": "Hi"}]] * 2, **fields)


def test_a_list_cannot_be_streamed(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="stream is for one prompt"):
        llm.generate(["a", "b"], stream=True)  # type: ignore[call-overload]


def test_a_model_without_pooling_makes_no_embeddings_and_a_closed_one_nothing() -> None:
    llm = LLM(device="cpu", max_model_len=64)
    with pytest.raises(UnsupportedFeature, match="not an embedding model"):
        llm.embed("a")
    llm.close()
    llm.close()
    with pytest.raises(InvalidParameter, match="closed"):
        llm.chat("Hi")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_modellen": 3}, "LLM has no setting max_modellen: max_model_len is the nearest"),
        ({"port": 8000}, "LLM has no setting port"),
        ({"max_model_len": 0}, "^max_model_len: '0' is not a whole number from 1"),
        ({"dtype": True}, "dtype takes a value, not True"),
        ({"enforce_eager": 3}, "enforce_eager is True or False, not 3"),
    ],
)
def test_wrong_settings_are_named_by_their_keyword(settings: dict[str, object], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        read_settings(None, settings)


def test_settings_are_the_flags_of_serve() -> None:
    engine, server = read_settings(
        None,
        {"max_model_len": 64, "enforce_eager": True, "overlap": False, "kv_cache_memory": "1GiB", "revision": None},
    )
    assert (engine.max_model_len, engine.enforce_eager, engine.overlap_depth) == (64, True, 1)
    assert (engine.kv_cache_memory_bytes, engine.is_offline, server.strict) == (2**30, True, True)
