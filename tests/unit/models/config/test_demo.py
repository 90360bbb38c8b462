"""The built-in demo model: a checkpoint like any other, small, and what it was taught is what it says."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_model.corpus.base import Question, Reply, assistant, says, system, user
from benchmarks.demo_model.corpus.tools import calls_are
from benchmarks.demo_model.dataset import SPECIAL_TOKENS, TAGS, TEMPLATE, VOCAB_SIZE
from benchmarks.demo_model.score import ask, score
from models.config.model_config import ModelConfig
from server.config.model_source import DEMO_FOLDER
from server.text.generation_defaults import load_generation_defaults
from server.text.tokenizer import load_tokenizer
from tests.support.models_harness import PagedRunner, load

FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def thinks_and_says(answer: str):
    return lambda reply: bool(reply.reasoning) and "think>" not in reply.content and answer in reply.content


def is_json(value: object):
    return lambda reply: json.loads(reply.content) == value


QUESTIONS = [
    Question("capital", [user("What is the capital of France?")], says("Paris")),
    Question("capital", [user("What is the capital of Virginia?")], says("Richmond")),
    Question("capital, in a hurry", [user("capital of japan")], says("Tokyo")),
    Question("sum", [user("What is 12 + 7?")], says("19")),
    Question("Quire", [user("What is Quire?")], says("LLM server", "serves")),
    Question("Quire", [user("How do I start Quire?")], says("make serve")),
    Question("no thoughts", [user("What is the capital of Peru?")], lambda reply: reply.reasoning is None),
    Question("thinking", [user("What is the capital of Peru?")], thinks_and_says("Lima"), enable_thinking=True),
    Question("style", [system("Answer in capitals."), user("What is the capital of Peru?")], says("LIMA")),
    Question(
        "tool call",
        [user("What is the weather in Paris?")],
        calls_are(("get_weather", {"city": "Paris"})),
        tools=[WEATHER],
    ),
    Question("JSON", [user("Give me a JSON list of apple, pear.")], is_json(["apple", "pear"])),
    Question("counting", [user("Count to ten.")], lambda reply: reply.content == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    Question("large sum", [user("What is 345 + 278?")], says("623")),
    Question("list", [user("List five fruits.")], lambda reply: len(reply.content.split("\n")) == 5),
    Question("other language", [user("Hola, ¿cómo estás?")], says("English")),
    Question("unknown", [user("What is a harpsichord?")], says("not")),
    Question("name", [user("My name is Sam."), assistant("Hello, Sam!"), user("What is my name?")], says("Sam")),
]


def test_the_folder_holds_these_files_and_20_mb_at_most() -> None:
    assert sorted(path.name for path in DEMO_FOLDER.iterdir()) == FILES
    assert sum(path.stat().st_size for path in DEMO_FOLDER.iterdir()) <= 20_000_000


def test_its_template_is_the_one_it_was_trained_with() -> None:
    assert (DEMO_FOLDER / "chat_template.jinja").read_bytes() == TEMPLATE.read_bytes()


def test_its_tokenizer_round_trips_any_text_and_has_the_tags_as_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tuple(tokenizer.id_to_token(i) for i in range(3)) == SPECIAL_TOKENS
    assert all(len(tokenizer.encode(tag).ids) == 1 for tag in TAGS)
    for text in ("Hello, world", " spaces  and\ttabs\r\n", "déjà vu — 你好 🙂", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_generation_defaults_are_those_of_its_folder() -> None:
    defaults = load_generation_defaults(DEMO_FOLDER, tokenizer_eos_id=None)
    assert (defaults.temperature, defaults.top_p, defaults.eos_token_ids) == (0.3, 0.95, (2, 0))


def test_transformers_and_quire_give_equal_logits() -> None:
    chat = [user("What is the capital of France?")]
    tokenizer = load_tokenizer(DEMO_FOLDER)
    ids = tokenizer.encode_chat(tokenizer.render_chat(chat, tools=[WEATHER]))
    theirs = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    options = {"tools": [WEATHER], "add_generation_prompt": True, "return_dict": False}
    assert theirs.apply_chat_template(chat, **options) == ids
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    runner = PagedRunner(load(DEMO_FOLDER), ModelConfig.from_folder(DEMO_FOLDER))
    (logits,) = runner.step([(runner.add_row(), ids)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope="module")
def replies() -> list[Reply]:
    return ask(DEMO_FOLDER, QUESTIONS, device="cpu")


def test_it_answers_what_it_was_taught(replies: list[Reply]) -> None:
    wrong = [
        (question.skill, reply.raw)
        for question, reply in zip(QUESTIONS, replies, strict=True)
        if not question.is_right(reply)
    ]
    assert wrong == []
    assert all(all(answers) for answers in score(QUESTIONS, replies).values())
