"""Exceptions that select some experts of a layer are refused by entry and layer; all of a layer are honoured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.quantization.config import LayerNames

SHAPES = Path("benchmarks/shapes")
AWQ, FP8, PACKED = "qwen3-30b-a3b-awq", "qwen3-30b-a3b-fp8", "glm-4.5-air-int4"


def read(folder: Path, shape: str, **fields: Any) -> ModelConfig:
    raw = json.loads((SHAPES / shape / "config.json").read_text())
    raw["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize(
    ("shape", "field", "entry", "layer"),
    [
        (AWQ, "modules_to_not_convert", "model.layers.3.mlp.experts.0.down_proj", 3),
        (AWQ, "modules_to_not_convert", "model.layers.3.mlp.experts.77.gate_proj", 3),
        (FP8, "modules_to_not_convert", "experts.127", 0),
        (FP8, "modules_to_not_convert", "5.up_proj", 0),
        (PACKED, "ignore", r"re:model\.layers\.7\.mlp\.experts\.1\d\..*", 7),
        (PACKED, "ignore", r"re:.*\.9\.mlp\.experts\.\d+\.down_proj$", 9),
    ],
)
def test_an_entry_that_selects_some_experts_of_a_layer_is_refused(
    tmp_path: Path, shape: str, field: str, entry: str, layer: int
) -> None:
    words = rf"model\.layers\.{layer}\.mlp\.experts\..* by the entry {re.escape(repr(entry))} of quantization_config"
    with pytest.raises(ModelError, match=words):
        read(tmp_path, shape, **{field: [entry]})


@pytest.mark.parametrize("entry", ["model.layers.3.mlp.experts", r"re:model\.layers\.3\.mlp\.experts\.\d+\..*"])
def test_an_entry_that_selects_all_experts_of_a_layer_is_honoured(tmp_path: Path, entry: str) -> None:
    config = read(tmp_path, AWQ, modules_to_not_convert=[entry])
    assert config.quantization.scheme_of("model.layers.3.mlp.experts.5.up_proj") is None
    assert config.quantization.scheme_of("model.layers.4.mlp.experts.5.up_proj") is not None


def test_single_entries_of_all_experts_are_honoured(tmp_path: Path) -> None:
    names = [f"model.layers.3.mlp.experts.{expert}" for expert in range(128)]
    config = read(tmp_path, AWQ, modules_to_not_convert=names)
    assert config.quantization.scheme_of("model.layers.3.mlp.experts.127.up_proj") is None


@pytest.mark.parametrize(
    ("pattern", "name", "is_in"),
    [
        ("mlp", "model.layers.0.mlp.gate_proj", True),
        ("layers.0", "model.layers.0.mlp", True),
        ("layers.0", "model.layers.01.mlp", False),
        ("layers.1", "model.layers.10.mlp", False),
        ("model.layers.0.mlp", "model.layers.0.mlp", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        (r"re:.*gate", "model.layers.0.mlp.gate_proj", True),
        (r"re:gate", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_a_pattern_is_whole_components_or_an_expression(pattern: str, name: str, is_in: bool) -> None:
    assert (name in LayerNames((pattern,))) is is_in
    assert LayerNames((pattern,)).entry_of(name) == (pattern if is_in else None)
