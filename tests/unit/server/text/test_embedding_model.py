"""What sentence-transformers' files say of a folder's embeddings, and what of it is not served."""

import json

import pytest

from engine.interface.errors import StartupError
from server.text.embedding_model import EmbeddingModel, load_embedding_model
from tests.support.embedding_folder import PROMPTS, write_embedding_files


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def refused(folder, **options):
    with pytest.raises(StartupError) as caught:
        load_embedding_model(folder, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("mode", "kind"), [("lasttoken", "last"), ("mean_tokens", "mean")])
def test_the_folder_says_how_it_pools(tmp_path, mode, kind):
    write_embedding_files(tmp_path, pooling=mode)
    assert load_embedding_model(tmp_path) == EmbeddingModel(pooling=kind, prompts=PROMPTS)
    assert load_embedding_model(tmp_path, pooling="last").pooling == "last"
    assert load_embedding_model(tmp_path, pooling="mean").pooling == "mean"


@pytest.mark.parametrize("named", ["mean", ["mean"], "lasttoken"])
def test_the_newer_form_names_the_mode(tmp_path, named):
    write_embedding_files(tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": named})
    assert load_embedding_model(tmp_path).pooling == ("last" if named == "lasttoken" else "mean")


def test_the_newer_module_names_are_known(tmp_path):
    write_embedding_files(tmp_path)
    write(
        tmp_path,
        "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.pooling.Pooling"},
        ],
    )
    assert load_embedding_model(tmp_path).pooling == "last"


def test_a_generator_embeds_only_when_told_how(tmp_path):
    write(tmp_path, "config.json", {"architectures": ["LlamaForCausalLM"]})
    assert load_embedding_model(tmp_path) is None
    assert load_embedding_model(tmp_path, pooling="mean") == EmbeddingModel(pooling="mean")


def test_a_model_without_a_head_must_say_how_it_pools(tmp_path):
    write(tmp_path, "config.json", {"architectures": ["Qwen3Model"]})
    message = refused(tmp_path)
    assert "Qwen3Model" in message
    assert "--pooling last or mean" in message
    assert load_embedding_model(tmp_path, pooling="last") == EmbeddingModel(pooling="last")


@pytest.mark.parametrize("mode", ["cls_token", "max_tokens", "weightedmean_tokens", "mean_sqrt_len_tokens", "no-such"])
def test_other_poolings_are_refused_by_name(tmp_path, mode):
    write_embedding_files(tmp_path, pooling=mode)
    message = refused(tmp_path)
    assert (mode if mode != "no-such" else "nothing") in message
    assert load_embedding_model(tmp_path, pooling="mean").pooling == "mean"


def test_two_poolings_at_once_are_refused(tmp_path):
    write_embedding_files(tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True})
    assert "lasttoken, mean_tokens" in refused(tmp_path)


def test_a_mean_without_the_prompt_is_refused_and_last_is_the_same_without(tmp_path):
    write_embedding_files(tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False})
    assert "include_prompt" in refused(tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_lasttoken": True, "include_prompt": False})
    assert load_embedding_model(tmp_path).pooling == "last"


@pytest.mark.parametrize("kind", ["Dense", "CNN", "LayerNorm"])
@pytest.mark.parametrize("pooling", ["auto", "last"])
def test_modules_that_would_change_the_vector_are_refused(tmp_path, kind, pooling):
    write_embedding_files(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2]["type"] = f"sentence_transformers.models.{kind}"
    write(tmp_path, "modules.json", modules)
    assert kind in refused(tmp_path, pooling=pooling)


@pytest.mark.parametrize("text", ["{", "{}", "[5]", '[{"path": ""}]', "\xff"])
def test_broken_modules_are_one_sentence(tmp_path, text):
    (tmp_path / "modules.json").write_bytes(text.encode("latin-1"))
    assert "modules.json" in refused(tmp_path)


def test_a_pooling_folder_outside_is_not_read(tmp_path):
    write_embedding_files(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    write(tmp_path, "modules.json", modules)
    assert "a folder of its own" in refused(tmp_path)


def test_a_default_prompt_must_be_one_of_the_prompts(tmp_path):
    write_embedding_files(tmp_path, default_prompt="query")
    assert load_embedding_model(tmp_path).default_prompt == PROMPTS["query"]
    write_embedding_files(tmp_path, default_prompt="title")
    assert "title" in refused(tmp_path)
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": 5}})
    assert "prompts" in refused(tmp_path)
