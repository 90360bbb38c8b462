"""What the headers of safetensors files say is what the files hold, and what config.json means."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.weights.checkpoint import folder_stats
from tests.support.checkpoints import make_configs
from tests.support.reference import save_checkpoint

CONFIGS = make_configs()


@pytest.mark.parametrize("kind", ["llama2", "llama_all_biases", "qwen3", "phi3", "olmo2", "gemma3", "deepseek_v2"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_headers_hold_what_the_config_means(tmp_path: Path, kind: str, shard: str) -> None:
    save_checkpoint(tmp_path, CONFIGS[kind], max_shard_size=shard)
    config = ModelConfig.from_folder(tmp_path)
    found = folder_stats(tmp_path, needs_head=not config.tie_word_embeddings)
    tensors = [tensor for path in tmp_path.glob("*.safetensors") for tensor in load_file(path).values()]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "1GB"
    assert found.num_parameters == sum(tensor.numel() for tensor in tensors) == config.num_parameters
    assert found.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert found.dtypes == ("F32",)


def test_what_a_model_does_not_read_is_not_counted(tmp_path: Path) -> None:
    tensors = {
        "language_model.model.norm.weight": torch.zeros(8, dtype=torch.bfloat16),
        "language_model.model.layers.0.scale": torch.zeros(2, dtype=torch.float32),
        "language_model.lm_head.weight": torch.zeros(8, 8),
        "vision_tower.patch.weight": torch.zeros(4, 4),
        "language_model.model.layers.0.rotary_emb.inv_freq": torch.zeros(4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 5
    found = folder_stats(tmp_path, needs_head=False, ignored_prefixes=("vision_tower.",))
    assert (found.num_parameters, found.num_bytes, found.dtypes) == (10, 24, ("BF16", "F32"))
    assert folder_stats(tmp_path).num_parameters == 10 + 64 + 16


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert folder_stats(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert folder_stats(tmp_path) is None


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"1 of its 2 files are missing, first y\.safetensors"):
        folder_stats(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"\x05\0\0\0\0\0\0\0[", b"\xff" * 9, b"\x02\0\0\0\0\0\0\0[]", b'\x08\0\0\0\0\0\0\0{"a": 5}'], ids=repr
)
def test_a_file_that_is_none_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        folder_stats(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 5}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="malformed index"):
        folder_stats(tmp_path)
