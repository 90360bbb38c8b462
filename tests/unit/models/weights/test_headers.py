"""The headers of a checkpoint's files are checked against its config before any weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.interface.fit_report import Ask
from engine.startup import load
from engine.startup.fit import examine
from models.build import check_headers
from models.config.model_config import ModelConfig
from models.errors import ModelError
from models.parallel import TensorParallel
from tests.support.header_files import entries_of, save_headers

SHAPES = Path("benchmarks/shapes")
FP8, EXPERT = "qwen3-30b-a3b-fp8", "model.layers.1.mlp.experts.77.down_proj"


def save(folder: Path, shape: str, *, num_files: int = 1, **changes: tuple[str, tuple[int, ...]] | None) -> ModelConfig:
    """Save two layers of a published shape. changes: the tensors of EXPERT that are others; None: missing."""
    raw = json.loads((SHAPES / shape / "config.json").read_text()) | {"num_hidden_layers": 2}
    if "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_folder(folder)
    entries = entries_of(config)
    for name, entry in changes.items():
        assert f"{EXPERT}.{name}" in entries
        if entry is None:
            del entries[f"{EXPERT}.{name}"]
        else:
            entries[f"{EXPERT}.{name}"] = entry
    save_headers(folder, entries, num_files=num_files)
    return config


def check(folder: Path, config: ModelConfig, tp_size: int = 1) -> None:
    check_headers(config, folder, TensorParallel(0, tp_size), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "shape", [FP8, "qwen3-30b-a3b-awq", "qwen3-30b-a3b-nvfp4", "glm-4.5-air-int4", "gpt-oss-120b-mxfp4"]
)
@pytest.mark.parametrize("num_files", [1, 3])
def test_what_a_config_means_is_found(tmp_path: Path, shape: str, num_files: int) -> None:
    config = save(tmp_path, shape, num_files=num_files)
    check(tmp_path, config)
    check(tmp_path, config, tp_size=2)


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        (FP8, {"weight_scale_inv": None}, r"weight_scale_inv or weight_scale with shape \[16, 6\] is missing"),
        (FP8, {"weight_scale_inv": ("F32", (6, 16))}, r"weight_scale_inv has shape \[6, 16\], .* requires \[16, 6\]"),
        (FP8, {"weight_scale_inv": ("I32", (16, 6))}, r"weight_scale_inv is int32, .* float32 or bfloat16 or float16"),
        (FP8, {"weight": ("BF16", (2048, 768))}, r"weight is bfloat16, but config\.json requires float8_e4m3fn"),
        ("qwen3-30b-a3b-awq", {"qzeros": None}, r"qzeros with shape \[6, 256\] is missing"),
        ("qwen3-30b-a3b-awq", {"scales": ("F16", (12, 2048))}, r"scales has shape \[12, 2048\], .* \[6, 2048\]"),
        ("qwen3-30b-a3b-nvfp4", {"weight_scale": ("U8", (2048, 48))}, r"weight_scale is uint8, .* float8_e4m3fn"),
    ],
)
def test_a_tensor_of_one_expert_is_refused_by_name_with_its_scheme(
    tmp_path: Path, shape: str, changes: dict[str, tuple[str, tuple[int, ...]] | None], words: str
) -> None:
    config = save(tmp_path, shape, **changes)
    scheme = config.quantization.scheme_of(EXPERT).describe()
    with pytest.raises(ModelError, match=rf"tensor model\.layers\.1\.mlp\.experts\.77\.down_proj\.{words}") as caught:
        check(tmp_path, config)
    assert str(caught.value).endswith(f"quantized as {scheme}")


def test_a_file_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    config = save(tmp_path, FP8, num_files=3)
    path = tmp_path / "model-00002-of-00003.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(ModelError, match=rf"00002-of-00003.* has {size - 1} bytes, but its header says {size}"):
        check(tmp_path, config)


class Operations(TorchDispatchMode):
    """Keeps the names of what is computed of tensors without values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(torch.is_tensor(leaf) and leaf.is_meta for leaf in tree_leaves(args)):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("shape", "name"), [("qwen3-0.6b", "aten.cat.default"), ("gemma-2-9b", "aten.add.Tensor")])
def test_headers_are_checked_without_torch_dynamo_which_takes_a_second_to_import(
    tmp_path: Path, shape: str, name: str
) -> None:
    config = save(tmp_path, shape)
    with Operations() as operations:
        check(tmp_path, config)
    assert operations.names
    assert name not in operations.names


def test_a_folder_without_weights_is_not_judged(tmp_path: Path) -> None:
    shutil.copy(SHAPES / FP8 / "config.json", tmp_path)
    check(tmp_path, ModelConfig.from_folder(tmp_path))


def test_the_start_refuses_before_weights_are_read(tmp_path: Path) -> None:
    save(tmp_path, FP8, weight_scale_inv=None)
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_memory_bytes=1 << 26, max_model_len=64)
    with (
        mock.patch.object(load, "_load_weights", side_effect=AssertionError("weights are read")),
        pytest.raises(StartupError, match=r"experts\.77\.down_proj\.weight_scale_inv .* is missing"),
    ):
        load.load_engine(config, lambda stage: None)


def test_doctor_says_no_and_still_has_the_figures(tmp_path: Path) -> None:
    save(tmp_path, FP8, weight_scale_inv=("F32", (1, 1)))
    model = examine(Ask(folder=str(tmp_path), device="cuda", gpu_memory=80 << 30)).model
    assert model is not None
    assert model.problem is not None
    assert "experts.77.down_proj.weight_scale_inv has shape [1, 1]" in model.problem
    assert model.room is not None
