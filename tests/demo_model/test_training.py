"""The demo's tokenizer, template, documents and training loop; what they make is a checkpoint like any other."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_model.corpus.base import Dialogue, assistant, system, user
from benchmarks.demo_model.dataset import (
    SPECIAL_TOKENS,
    TAGS,
    TEMPLATE,
    Kind,
    documents,
    kinds_of,
    make_rows,
    pack,
    save_tokenizer,
    train_tokenizer,
    with_long_chats,
)
from benchmarks.demo_model.train import Recipe, train
from models.config.model_config import ModelConfig
from server.text.tokenizer import load_tokenizer
from tests.demo_model.small_corpus import CALL, WEATHER, stub
from tests.support import templates
from tests.support.models_harness import PagedRunner, load

CHATS = {
    "plain": [user("Hi")],
    "system": [system("Be brief."), user("Hi"), assistant("Hello."), user("And?")],
    "answered": [user("Hi"), assistant("\nHello.")],
    "thoughts": [user("1 + 1?"), assistant("2", reasoning_content="\n1 and 1.\n"), user("2 + 2?")],
    "thoughts of the last turn": [user("1 + 1?"), assistant("2", reasoning_content="1 and 1.")],
    "thoughts in the text": [user("1 + 1?"), assistant("<think>\n1 and 1.\n</think>\n\n2")],
    "call": [user("Weather?"), assistant("", tool_calls=[CALL])],
    "call with words": [user("Weather?"), assistant("I look.", tool_calls=[CALL, CALL])],
    "results": [
        user("Weather?"),
        assistant(None, tool_calls=[CALL], reasoning_content="Ask."),
        {"role": "tool", "content": '{"sky": "blue"}'},
        {"role": "tool", "content": "warm"},
    ],
    "after results": [
        user("Weather?"),
        assistant("", tool_calls=[{"function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]),
        {"role": "tool", "content": "warm"},
        assistant("It is warm."),
        user("Thanks"),
        assistant("You are welcome."),
    ],
}
OPTIONS = [
    {},
    {"tools": [WEATHER, WEATHER]},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": True},
    {"add_generation_prompt": True, "enable_thinking": False, "tools": [WEATHER]},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(documents(itertools.islice(stub(1), 2000), random.Random(1)), vocab_size=600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    recipe = Recipe(shape="tiny", num_dialogues=2000, steps=20, row_tokens=128, batch_tokens=2048, warm_up_steps=2)
    train(recipe, folder, stream=stub, device=torch.device("cpu"), num_processes=1)
    return folder


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", CHATS)
def test_template_renders_the_same_here_and_in_transformers(tokenizer, tmp_path, name, options):
    save_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CHATS[name], **{"add_generation_prompt": False, **options}, tokenize=False
    )
    own = {"add_generation_prompt": False, **options}
    kwargs = {key: own.pop(key) for key in ("enable_thinking",) if key in own}
    assert load_tokenizer(tmp_path).render_chat(CHATS[name], **own, template_kwargs=kwargs).text == theirs


@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize("name", CHATS)
def test_template_gives_the_format_of_the_qwen3_family(tokenizer, tmp_path, name, is_thinking):
    save_tokenizer(tokenizer, tmp_path)
    qwen3 = tmp_path / "qwen3.jinja"
    qwen3.write_text(templates.QWEN3_LIKE)
    options = {"template_kwargs": {"enable_thinking": is_thinking}}
    ours, theirs = (load_tokenizer(tmp_path, chat_template=path) for path in (TEMPLATE, qwen3))
    expected = theirs.render_chat(CHATS[name], **options).text
    # the stand-in starts a call on a new line even where nothing is before it
    expected = expected.replace("assistant\n\n<tool_call>", "assistant\n<tool_call>")
    expected = expected.replace("</think>\n\n\n<tool_call>", "</think>\n\n<tool_call>")
    assert ours.render_chat(CHATS[name], **options).text == expected


@pytest.mark.parametrize("content", ["The answer", "The answer  ", " is\n"])
def test_final_message_is_continued_as_in_transformers(tokenizer, tmp_path, content):
    save_tokenizer(tokenizer, tmp_path)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    chat = [user("Hi"), assistant(content)]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, **options, tokenize=False)
    assert load_tokenizer(tmp_path).render_chat(chat, **options).text == theirs


def test_thinking_is_off_unless_asked_for(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.render_chat([user("Hi")]).text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    options = {"template_kwargs": {"enable_thinking": True}}
    assert ours.render_chat([user("Hi")], **options).text.endswith("<|im_start|>assistant\n")


def test_tokenizer_round_trips_any_text_and_cuts_numbers_into_digits(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello, world", " spaces  and\ttabs\r\n", "déjà vu — 你好 🙂", "\x00\x7f", "It's 10:45, isn't it?"):
        ids = ours.encode(text)
        assert ours.decode(ids) == text == theirs.decode(ids)
        assert theirs.encode(text) == ids
    assert [ours.decode([token_id]) for token_id in ours.encode("1234 56")] == ["1", "2", "3", "4", " ", "5", "6"]
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert ours.special_ids == {0, 1, 2}
    for tag in TAGS:
        assert len(ours.encode(tag)) == 1
        assert theirs.decode(theirs.encode(tag), skip_special_tokens=True) == tag


def test_tokenizer_is_the_same_each_time(tokenizer):
    again = train_tokenizer(documents(itertools.islice(stub(1), 2000), random.Random(1)), vocab_size=600)
    assert again.to_str() == tokenizer.to_str()


def learned(tokenizer, dialogue):
    """What of the dialogue's document the loss asks for, silent tokens between as bars."""
    text = next(documents(iter([dialogue]), random.Random(0)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    kinds = kinds_of(np.array(ids, np.uint16), tokenizer)
    runs = itertools.groupby(zip(kinds, ids, strict=True), key=lambda pair: pair[0] == Kind.TARGET)
    return [tokenizer.decode([i for _, i in run], skip_special_tokens=False) for is_target, run in runs if is_target]


def test_answers_are_learned_from_where_the_generation_prompt_ends(tokenizer):
    assert learned(tokenizer, Dialogue([user("Hi"), assistant("7!")])) == ["7!<|im_end|>"]
    thinking = Dialogue([user("Hi"), assistant("7!", reasoning_content="1 and 6")], enable_thinking=True)
    assert learned(tokenizer, thinking) == ["<think>\n1 and 6\n</think>\n\n7!<|im_end|>"]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>'
    assert learned(tokenizer, Dialogue([user("Hi"), assistant("", tool_calls=[CALL])], (WEATHER,))) == [call]


def test_an_older_answer_is_learned_but_for_its_first_token(tokenizer):
    rendered = "<|im_start|>assistant\n1!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n3!<|im_end|>\n"
    ids = tokenizer.encode(rendered, add_special_tokens=False).ids
    kinds = kinds_of(np.array(ids, np.uint16), tokenizer)
    targets = [i for kind, i in zip(kinds, ids, strict=True) if kind == Kind.TARGET]
    assert tokenizer.decode(targets, skip_special_tokens=False) == "!<|im_end|>3!<|im_end|>"


def test_long_chats_are_of_dialogues_that_can_stand_together():
    dialogues = list(itertools.islice(with_long_chats(stub(2), random.Random(2)), 2000))
    lengths = [len(dialogue.messages) for dialogue in dialogues]
    assert 0 < sum(length > 5 for length in lengths) < 400
    for dialogue in dialogues:
        assert [message["role"] for message in dialogue.messages].count("system") <= 1
        assert not dialogue.tools or len(dialogue.messages) <= 4
        spoken = [message["role"] for message in dialogue.messages if message["role"] in ("user", "assistant")]
        assert dialogue.tools or spoken == ["user", "assistant"] * (len(spoken) // 2)


def test_documents_fill_rows_without_overlap():
    rng = random.Random(3)
    lengths = [rng.randrange(1, 41) for _ in range(500)]
    used = {}
    for (row, start), length in zip(pack(lengths, 100), lengths, strict=True):
        used.setdefault(row, []).extend(range(start, start + length))
    assert all(sorted(cells) == list(range(len(cells))) and len(cells) <= 100 for cells in used.values())
    assert sum(lengths) / (100 * len(used)) > 0.95


def test_rows_depend_on_the_seed_alone_and_hold_every_document(tokenizer, monkeypatch):
    monkeypatch.setattr("benchmarks.demo_model.dataset._SHARD_DIALOGUES", 400)
    options = {"seed": 5, "num_dialogues": 1000, "row_tokens": 512}
    rows, again = (make_rows(stub, tokenizer, **options, num_processes=n) for n in (1, 2))
    assert np.array_equal(rows.tokens, again.tokens)
    assert np.array_equal(rows.kinds, again.kinds)
    assert rows.num_dialogues == 1000
    starts = (rows.kinds == Kind.FIRST) & (rows.tokens == tokenizer.token_to_id("<|im_start|>"))
    assert starts.sum() == 1000


def test_twenty_steps_lower_the_loss_and_say_so(trained):
    report = json.loads((trained / "training.json").read_text())
    assert report["steps"] == 20
    assert report["curve"][-1]["unseen_loss"] < np.log(600) - 1
    assert sorted(path.name for path in trained.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]


def test_transformers_and_quire_give_equal_logits(trained: Path):
    tokenizer = load_tokenizer(trained)
    ids = tokenizer.encode_chat(tokenizer.render_chat([user("What is 3 + 4?")], tools=[WEATHER]))
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.generation_config.eos_token_id == [2, 0]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    runner = PagedRunner(load(trained), ModelConfig.from_folder(trained))
    (logits,) = runner.step([(runner.add_row(), ids)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_document_sees_only_itself(trained: Path):
    from benchmarks.demo_model.train import losses

    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    torch.manual_seed(0)
    tokens = torch.randint(3, 300, (1, 24))
    kinds = torch.full((1, 24), int(Kind.CONTEXT), dtype=torch.uint8)
    kinds[0, [0, 12]] = int(Kind.FIRST)
    kinds[0, 18:] = int(Kind.TARGET)
    alone = losses(model, tokens[:, 12:], kinds[:, 12:], 0.0)
    torch.testing.assert_close(losses(model, tokens, kinds, 0.0)[0], alone[0], atol=1e-5, rtol=0)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch):
    options = {"stream": stub, "device": torch.device("cpu"), "num_processes": 1}
    shape = {"shape": "tiny", "num_dialogues": 500, "row_tokens": 128, "batch_tokens": 1024, "warm_up_steps": 2}
    monkeypatch.setattr("benchmarks.demo_model.train._SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(Path, "unlink", lambda path: None)
    train(Recipe(**shape, steps=4), tmp_path, **options)
    assert (tmp_path / "state.pt").is_file()
    monkeypatch.undo()
    assert train(Recipe(**shape, steps=6), tmp_path, **options, is_resumed=True)["steps"] == 6
