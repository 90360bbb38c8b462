"""Files of a model folder that are nested too deeply to be parsed: one sentence names the file."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.interface.errors import StartupError
from engine.startup.fit import _raw_config
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.lora.config import LoraConfig
from server.config.model_source import DEMO_FOLDER
from server.text.embedding_model import load_embedding_model
from server.text.generation_defaults import read_json
from server.text.tokenizer import load_tokenizer
from tests.integration.test_bad_start import NESTED, edit_config


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", ModelConfig.from_folder),
        ("adapter_config.json", LoraConfig.from_folder),
        ("modules.json", load_embedding_model),
        ("generation_config.json", lambda folder: read_json(folder / "generation_config.json")),
    ],
)
def test_the_error_names_the_json_file(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    (tmp_path / name).write_text(f"[{NESTED}]" if name == "modules.json" else NESTED)
    with pytest.raises((ModelError, StartupError), match=f"{name}.*nested too deeply"):
        read(tmp_path)


def test_what_describes_a_folder_leaves_its_config_to_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(NESTED)
    assert _raw_config(tmp_path) == {}


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
        "{{ " + "not " * 10_000 + "1 }}",
        "{% if a %}" * 150 + "{% endif %}" * 150,  # too many indents in Python
    ],
    ids=["parentheses", "operators", "blocks"],
)
def test_the_error_names_the_template(tmp_path: Path, template: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(StartupError, match=r"chat template of .* nested too deeply"):
        load_tokenizer(tmp_path)


def test_a_billion_layers_are_refused_before_a_list_has_so_many_entries(tmp_path: Path) -> None:
    shutil.copy(DEMO_FOLDER / "config.json", tmp_path)
    edit_config(tmp_path, num_hidden_layers=10**9, layer_types=None)
    with pytest.raises(ModelError, match="num_hidden_layers 1000000000 is larger than 10000"):
        ModelConfig.from_folder(tmp_path)
