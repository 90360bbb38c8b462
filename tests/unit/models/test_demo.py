"""The built-in demo checkpoint is what its script makes, and what transformers understands."""

from pathlib import Path

import pytest
import tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.demo.build import CHECKPOINT, SPECIAL_TOKENS, VOCAB_SIZE, build

FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    build(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in FILES if name != "tokenizer.json"])
def test_committed_files_are_what_the_script_builds(built: Path, name: str) -> None:
    assert (built / name).read_bytes() == (CHECKPOINT / name).read_bytes()


def test_committed_tokenizer_is_what_the_script_trains(built: Path) -> None:
    # compared by content: the library's way of writing JSON may change with its version
    ours, theirs = (tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (built, CHECKPOINT))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.to_str() == theirs.to_str()


def test_no_other_file_is_shipped() -> None:
    assert sorted(path.name for path in CHECKPOINT.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 4 * 2**20


def test_tokenizer_round_trips_any_text_and_keeps_special_tokens_first() -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.id_to_token(i) for i in range(3)] == SPECIAL_TOKENS
    for text in ("Hello, world", " spaces  and\ttabs\r\n", "déjà vu — 你好 🙂", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_loads_it_as_a_llama_and_answers_a_chat() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert output.shape[1] == inputs["input_ids"].shape[1] + 8
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
