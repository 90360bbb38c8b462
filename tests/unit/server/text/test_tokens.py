"""/tokenize, /detokenize and the render routes: the same token ids that a generation would be given."""

import concurrent.futures
import threading
from pathlib import Path

import pytest

from server.text.tokenizer import load_tokenizer
from tests.unit.server.conftest import CHAT, COMPLETIONS, USER_HI, check_error

TEXT = "Schöne Grüße, 日本語 😀!"
CHAT_TEXT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


# rule: Endpoints: Texts and chats can be tokenized, ids made text
def test_a_text_is_tokenized_and_comes_back(harness):
    app = harness()
    reply = app.post("/tokenize", {"model": "tiny", "prompt": TEXT}).json()
    assert reply == {"tokens": app.ids(TEXT), "count": len(app.ids(TEXT)), "max_model_len": 256, "token_strs": None}
    assert app.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": TEXT}
    assert app.client.submitted == []


# rule: Endpoints: Texts and chats can be tokenized, ids made text
def test_a_chat_is_tokenized_as_its_completion_would_be(harness):
    app = harness()
    app.chat()
    tokens = app.post("/tokenize", {"messages": USER_HI}).json()["tokens"]
    assert tokens == app.client.submitted[0].prompt_token_ids
    assert app.post("/detokenize", {"tokens": tokens}).json()["prompt"] == CHAT_TEXT
    bare = app.post("/tokenize", {"messages": USER_HI, "add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(bare)] == bare
    assert app.post("/detokenize", {"tokens": bare}).json()["prompt"] == CHAT_TEXT.removesuffix(
        "<|im_start|>assistant\n"
    )


# rule: Endpoints: `/tokenizer_info` has the special tokens and the chat template, and no paths
def test_the_tokenizer_is_described(harness):
    app = harness()
    info = app.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["chat_template"] == load_tokenizer(Path(app.folder)).chat_template.source
    im_end = str(app.tokenizer.token_to_id("<|im_end|>"))
    assert info["added_tokens_decoder"][im_end] == {"content": "<|im_end|>", "special": True}
    assert str(app.folder) not in app.get("/tokenizer_info").text


def test_the_spellings_and_pieces_of_tokens_are_shown_on_request(harness):
    app = harness()
    reply = app.post("/tokenize", {"prompt": " é", "return_token_strs": True}).json()
    assert reply["token_strs"] == [app.tokenizer.id_to_token(id_) for id_ in reply["tokens"]]
    pieces = app.post("/tokenize", {"content": "a日", "with_pieces": True}).json()["tokens"]
    data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert data.decode() == "a日"
    assert [piece["id"] for piece in pieces] == app.ids("a日")


def test_special_tokens_are_added_as_each_house_does(harness, tmp_path):
    from tokenizers import processors

    from tests.unit.server.conftest import train_byte_level, write_model_folder

    tokenizer = train_byte_level()
    bos = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    app = harness(folder=write_model_folder(tmp_path / "bos", tokenizer=tokenizer))

    def first(**body: object) -> int:
        return app.post("/tokenize", body).json()["tokens"][0]

    assert first(prompt="hi") == first(content="hi", add_special=True) == bos
    assert first(prompt="hi", add_special_tokens=False) == first(content="hi") != bos
    assert first(messages=USER_HI) != bos
    error = check_error(
        app.post("/tokenize", {"messages": USER_HI, "add_special_tokens": True}), 400, "invalid_parameter"
    )
    assert error["param"] == "add_special_tokens"


def test_a_chat_longer_than_the_context_is_counted_and_not_refused(harness):
    app = harness()
    long = [{"role": "user", "content": "fox " * 400}]
    assert app.post("/tokenize", {"messages": long}).json()["count"] > 400
    check_error(app.chat(messages=long), 400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": USER_HI}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"), ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"), ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(harness, path, body, param):
    assert check_error(harness().post(path, body), 400, "invalid_parameter")["param"] == param


def test_an_empty_text_is_no_tokens(harness):
    app = harness()
    assert app.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert app.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_fields_without_effect_are_named_and_refused_if_strict(harness, path):
    body = {"prompt": "a", "parse_special": False} if path == "/tokenize" else {"tokens": [5], "foo": 1}
    name = "parse_special" if path == "/tokenize" else "foo"
    assert harness().post(path, body).headers["x-quire-ignored"] == name
    assert check_error(harness(strict=True).post(path, body), 400, "invalid_parameter")["param"] == name
    check_error(harness().post(path, {**body, "model": "nobody"}), 404, "model_not_found")


def test_fields_of_the_other_kind_of_prompt_and_of_messages_are_named(harness):
    app = harness()
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"prompt": "a", "tools": tools, "tool_choice": "auto", "continue_final_message": False, "foo": None, "b": []}
    assert app.post("/tokenize", body).headers["x-quire-ignored"] == "tool_choice, tools"
    body = {"messages": [{**USER_HI[0], "foo": 1}], "tools": tools, "tool_choice": "none", "foo": False}
    assert app.post("/tokenize", body).headers["x-quire-ignored"] == "tools, messages[0].foo"
    assert "x-quire-ignored" not in app.post("/detokenize", {"tokens": [5], "foo": None}).headers


# rule: Endpoints: Prompts can be rendered without generating
def test_rendering_a_chat_gives_its_prompt_and_generates_nothing(harness):
    app = harness()
    body = {"model": "tiny", "messages": USER_HI, "max_tokens": 5, "foo": 1}
    reply = app.post(CHAT + "/render", body)
    assert reply.headers["x-quire-ignored"] == "foo"
    rendered = reply.json()
    assert rendered["prompt"] == CHAT_TEXT
    assert rendered["model"] == "tiny"
    assert rendered["request_id"].startswith("chatcmpl-")
    assert app.client.submitted == []
    app.post(CHAT, body)
    assert app.client.submitted[0].prompt_token_ids == rendered["token_ids"]


# rule: Endpoints: Prompts can be rendered without generating
def test_rendering_completions_gives_each_prompt(harness):
    app = harness()
    reply = app.post(COMPLETIONS + "/render", {"prompt": [TEXT, "b"], "n": 2}).json()
    assert [one["prompt"] for one in reply] == [TEXT, "b"]
    assert [one["token_ids"] for one in reply] == [app.ids(TEXT), app.ids("b")]
    (ids,) = app.post(COMPLETIONS + "/render", {"prompt": [5, 6]}).json()
    assert ids["token_ids"] == [5, 6]
    check_error(app.post(COMPLETIONS + "/render", {"prompt": [5] * 300}), 400, "context_length_exceeded")
    check_error(app.post(CHAT + "/render", {"messages": USER_HI, "n": 0}), 400, "invalid_parameter")


def test_a_long_text_does_not_stop_the_worker(harness, model_folder):
    """encode() of tokenizers holds the interpreter's lock; what is used here must not, and must give the same ids."""
    app = harness()
    for text in ("", "a", TEXT, "<|im_end|> <think>\n\n x", " \n\n a  b" * 50):
        for is_special in (True, False):
            expected = app.tokenizer.encode(text, add_special_tokens=is_special).ids
            tokens = app.post("/tokenize", {"prompt": text, "add_special_tokens": is_special}).json()["tokens"]
            assert tokens == expected
    counted, is_done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not is_done.wait(0.001):
            counted += 1

    tokenizer = load_tokenizer(model_folder)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        counting = pool.submit(count)
        tokenizer.encode("a b " * 200_000)
        is_done.set()
        counting.result()
    assert counted > 3
