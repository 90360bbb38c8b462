"""An answer that goes on from its prompt joins it as in a whole decode; one that is a turn of its own stands alone."""

import pytest

from tests.support.templates import CHATML
from tests.unit.server.conftest import stream_chunks, train_sentencepiece_like, write_model_folder

TOKENIZER = train_sentencepiece_like()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentencepiece")
    return write_model_folder(path, tokenizer=TOKENIZER, chat_template=CHATML)


@pytest.fixture
def app(harness, folder):
    """The engine answers with two words, the first with a space before it."""
    return harness("the lazy", folder=folder)


def test_a_completion_keeps_the_space_before_its_first_word(app):
    for prompt in ("The quick", TOKENIZER.encode("The quick").ids):
        assert app.complete(prompt=prompt).json()["choices"][0]["text"] == " the lazy"
        assert app.complete(prompt=prompt, echo=True).json()["choices"][0]["text"] == "The quick the lazy"
        chunks = stream_chunks(app.complete(prompt=prompt, stream=True).text)
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == " the lazy"


def test_every_prompt_of_many_has_its_own_context(app):
    start_of_text = TOKENIZER.token_to_id("<s>")
    body = app.complete(prompt=[TOKENIZER.encode("The quick").ids, [start_of_text]], n=2).json()
    assert [choice["text"] for choice in body["choices"]] == [" the lazy"] * 2 + ["the lazy"] * 2


def test_text_offsets_count_the_space(app):
    choice = app.complete(prompt="The quick", logprobs=0).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    ends = [sum(map(len, logprobs["tokens"][: i + 1])) for i in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == [0, *ends[:-1]]


# rule: Fields: `chat_template_kwargs`, `add_generation_prompt` and `continue_final_message` act
def test_a_chat_answer_begins_without_it_unless_it_continues_a_message(app):
    messages = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "The quick"}]
    assert app.chat(messages=messages[:1]).json()["choices"][0]["message"]["content"] == "the lazy"
    answer = app.chat(messages=messages, continue_final_message=True).json()["choices"][0]["message"]["content"]
    assert answer == " the lazy"
