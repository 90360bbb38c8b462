"""MODEL becomes a folder that can be served, or one sentence that says why not."""

import json
from pathlib import Path

import pytest

from engine.interface.errors import StartupError
from server.config.hub_download import HUB_FILES, HUB_SKIPPED
from server.config.model_source import DEMO_FOLDER, model_facts, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with all that is looked for."""
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    return model


def refused(model: str | None, **options: str) -> StartupError:
    with pytest.raises(StartupError) as caught:
        resolve_model(model, **options)
    assert "\n" not in caught.value.message
    return caught.value


def test_no_model_is_the_demo() -> None:
    assert resolve_model(None) == (DEMO_FOLDER, "quire-demo")


def test_only_the_demo_is_said_to_be_one(folder: Path) -> None:
    assert "not for real work" in model_facts(str(resolve_model(None).folder))["Note"]
    assert model_facts(str(resolve_model(str(folder)).folder)) == {}


def test_a_folder_is_named_after_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_model("my-model/") == (folder, "my-model")
    monkeypatch.chdir(folder)
    assert resolve_model(".") == (folder, "my-model")


def test_a_sharded_folder_needs_every_shard_of_its_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    error = refused(str(folder))
    assert error.exit_code == 3
    assert "1 of 2" in error.message
    assert "model-00002-of-00002.safetensors" in error.message
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)).folder == folder


@pytest.mark.parametrize("model", ["no-such-folder", "./no/such", "/no/such/folder", "a/b/c", "", "~nobody-here/x"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_wrong_usage(model: str) -> None:
    error = refused(model)
    assert error.exit_code == 2
    assert repr(model) in error.message


def test_a_file_is_no_model(folder: Path) -> None:
    error = refused(str(folder / "config.json"))
    assert error.exit_code == 2
    assert "is a file" in error.message


@pytest.mark.parametrize(
    ("missing", "words"),
    [("config.json", "config.json"), ("tokenizer.json", "tokenizer"), ("model.safetensors", "weights")],
)
def test_a_missing_file_is_named(folder: Path, missing: str, words: str) -> None:
    (folder / missing).unlink()
    error = refused(str(folder))
    assert error.exit_code == 3
    assert words in error.message
    assert str(folder) in error.message


# rule: Security: No pickles, no code made of text, no code of a model folder
def test_pickled_weights_are_said_to_be_unread(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refused(str(folder)).message
    assert "*.bin, *.pt) are never read" in message
    assert f"M.from_pretrained({str(folder)!r}" in message


def test_weights_of_another_format_are_said_to_be_unread(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    assert "no other format (*.bin, *.pt, *.gguf) is read" in refused(str(folder)).message


def test_dummy_weights_need_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert resolve_model(str(folder), load_format="dummy").folder == folder


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    error = refused(str(folder))
    assert error.exit_code == 3
    assert "config.json" in error.message


def test_a_local_folder_has_no_revision(folder: Path) -> None:
    error = refused(str(folder), revision="main")
    assert error.exit_code == 2
    assert "--revision main" in error.message


def test_a_hub_id_without_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("cannot find\nthe appropriate snapshot folder")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    error = refused("owner/model")
    assert error.exit_code == 3
    assert "owner/model" in error.message
    assert "cannot be reached" in error.message


def test_a_hub_id_becomes_its_snapshot_and_keeps_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, object] = {}

    def download(repo_id: str, *, dry_run: bool = False, **options: object) -> str:
        if dry_run:  # the hub does not say what it has
            raise OSError
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/model", revision="v1") == (folder, "owner/model")
    assert asked["repo_id"] == "owner/model"
    assert asked["revision"] == "v1"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(
        pattern.endswith((".bin", ".py", "*")) for pattern in asked["allow_patterns"] if pattern != "tokenizer*"
    )


def test_of_a_hub_repository_that_is_fetched_which_is_read() -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model.safetensors", "tokenizer.json", "modules.json", "1_Pooling/config.json"]
    others = ["pytorch_model.bin", "onnx/model.safetensors", "original/params.json", "consolidated.safetensors"]
    others += ["2_Dense/model.safetensors", "modeling.py", "1_Pooling/pooling.py", "gguf/config.json"]
    found = filter_repo_objects(wanted + others, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED)
    assert list(found) == wanted
