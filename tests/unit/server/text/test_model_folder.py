"""What is read from a model's folder, and what is said when it cannot be read."""

import json
from pathlib import Path

import pytest

from engine.interface.errors import StartupError
from server.text.generation_defaults import load_generation_defaults
from server.text.tokenizer import load_tokenizer
from tests.unit.server.conftest import train_byte_level, write_model_folder


def write(folder: Path, **files: object) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


# rule: Fields: Defaults come from generation_config.json, and the request wins
def test_generation_config_goes_before_config_and_tokenizer(tmp_path: Path):
    write(tmp_path, generation_config={"eos_token_id": [1, 2], "temperature": 0.6}, config={"eos_token_id": 3})
    defaults = load_generation_defaults(tmp_path, tokenizer_eos_id=4)
    assert (defaults.eos_token_ids, defaults.temperature, defaults.top_p) == ((1, 2), 0.6, 1.0)
    write(tmp_path, generation_config={"temperature": "hot", "top_p": 7, "top_k": None})
    defaults = load_generation_defaults(tmp_path, tokenizer_eos_id=4)
    assert (defaults.eos_token_ids, defaults.temperature, defaults.top_p, defaults.top_k) == ((3,), 1.0, 1.0, 0)
    write(tmp_path, config={})
    assert load_generation_defaults(tmp_path, tokenizer_eos_id=4).eos_token_ids == (4,)
    assert load_generation_defaults(tmp_path, tokenizer_eos_id=None).eos_token_ids == ()


def test_of_a_model_of_several_parts_the_text_part_has_the_vocabulary_and_names_the_end(tmp_path: Path):
    text = {"vocab_size": 97, "eos_token_id": [2, 96]}
    write(tmp_path, config={"text_config": text, "eos_token_id": None}, generation_config={})
    assert load_generation_defaults(tmp_path, tokenizer_eos_id=4).eos_token_ids == (2, 96)
    write(tmp_path, generation_config={"eos_token_id": [5, 97]})  # with 97, each request would be refused
    assert load_generation_defaults(tmp_path, tokenizer_eos_id=4).eos_token_ids == (5,)
    write(tmp_path, config={"text_config": "?", "eos_token_id": 3}, generation_config={})
    assert load_generation_defaults(tmp_path, tokenizer_eos_id=4).eos_token_ids == (3,)


def test_settings_of_generation_that_have_no_effect_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    neutral = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "stop_strings": None}
    write(tmp_path, generation_config=neutral)
    load_generation_defaults(tmp_path, tokenizer_eos_id=4)
    assert not caplog.messages
    write(tmp_path, generation_config={**neutral, "suppress_tokens": [5], "no_repeat_ngram_size": 3, "num_beams": 4})
    load_generation_defaults(tmp_path, tokenizer_eos_id=4)
    fields = "no_repeat_ngram_size,num_beams,suppress_tokens"
    assert caplog.messages == [f"file=generation_config.json fields={fields} have no effect"]


def test_whole_numbers_in_generation_config_become_floats(tmp_path: Path):
    """The Responses API echoes them: 1.0, as where the folder names no temperature."""
    write(tmp_path, generation_config={"temperature": 1, "top_p": 1, "top_k": 20, "repetition_penalty": 2})
    defaults = load_generation_defaults(tmp_path, tokenizer_eos_id=4)
    values = (defaults.temperature, defaults.top_p, defaults.top_k, defaults.repetition_penalty)
    assert list(map(repr, values)) == ["1.0", "1.0", "20", "2.0"]


def test_numbers_that_are_none_or_nan_in_generation_config_count_as_absent(tmp_path: Path):
    write(tmp_path, generation_config={"temperature": True, "top_p": None, "min_p": 10**400, "top_k": [3]})
    defaults = load_generation_defaults(tmp_path, tokenizer_eos_id=4)
    assert (defaults.temperature, defaults.top_p, defaults.min_p, defaults.top_k) == (1.0, 1.0, 0.0, 0)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_broken_file_is_one_sentence(tmp_path: Path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"generation_config\.json") as info:
        load_generation_defaults(tmp_path, tokenizer_eos_id=None)
    assert "\n" not in info.value.message


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path):
    train_byte_level().model.save(str(tmp_path))
    names = dict.fromkeys(("eos_token", "bos_token", "unk_token"), "<|endoftext|>")
    write(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", **names}, config={"model_type": "gpt2"})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hello 日本")) == "Hello 日本"
    assert tokenizer.eos_id == 0


def test_a_folder_without_any_tokenizer_is_one_sentence(tmp_path: Path):
    with pytest.raises(StartupError, match="tokenizer") as info:
        load_tokenizer(tmp_path)
    assert "\n" not in info.value.message


def test_a_template_with_an_error_names_its_line(tmp_path: Path):
    for template in ("a\n{% if %}", "a\n{% nonsense %}", "a\n{{ 'b"):
        with pytest.raises(StartupError, match="line 2") as info:
            load_tokenizer(write_model_folder(tmp_path, chat_template=template))
        assert info.value.message.endswith(".")
        assert not info.value.message.endswith("..")


def test_truncation_in_tokenizer_json_does_not_cut_prompts(tmp_path: Path):
    folder = write_model_folder(tmp_path)
    backend = train_byte_level()
    backend.enable_truncation(max_length=4)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("Hello, world! How are you?")) > 4
