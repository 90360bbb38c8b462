"""Which device is chosen, and what is said where the one asked for is not there."""

import dataclasses
import logging
import warnings
from pathlib import Path

import pytest
import torch

import engine.startup.device_choice
from engine.interface.config import EngineConfig
from engine.interface.errors import StartupError
from engine.startup.device_choice import head_copy_bytes, resolve_device, resolve_dtype
from engine.startup.load import _select_backend
from models.config.layer_cache import LayerCache
from models.config.model_config import ModelConfig

DEMO = Path(__file__).parents[4] / "models" / "demo" / "checkpoint"
SHAPES = Path(__file__).parents[4] / "benchmarks" / "shapes"
TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update it."


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that is built with CUDA, on a machine without an Apple GPU."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return monkeypatch


def refusal(name: str) -> str:
    with pytest.raises(StartupError) as info:
        resolve_device(name)
    return info.value.message


def warn_too_old() -> bool:
    warnings.warn(TOO_OLD, stacklevel=1)
    return False


def test_a_torch_without_cuda_is_named(cuda_build: pytest.MonkeyPatch) -> None:
    cuda_build.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert refusal("cuda") == f"--device cuda: torch {torch.__version__} is built without CUDA: use --device cpu"


def test_no_driver_or_gpu_is_named(cuda_build: pytest.MonkeyPatch) -> None:
    assert "no NVIDIA driver or no GPU is found: use --device cpu" in refusal("cuda")


def test_a_driver_too_old_is_a_sentence_instead_of_a_warning(
    cuda_build: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    cuda_build.setattr(torch.cuda, "is_available", warn_too_old)
    message = refusal("cuda")
    assert "The NVIDIA driver on your system is too old (found version 11040): use --device cpu" in message
    assert not recwarn.list


def test_auto_falls_to_the_cpu_and_warns_if_a_gpu_is_at_fault(
    cuda_build: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine")
    assert resolve_device("auto").type == "cpu"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no NVIDIA driver" in caplog.text
    caplog.clear()
    cuda_build.setattr(torch.cuda, "is_available", warn_too_old)
    assert resolve_device("auto").type == "cpu"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "too old" in caplog.text


def test_without_triton_a_gpu_is_used_with_a_warning(
    cuda_build: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_build.setattr(torch.cuda, "is_available", lambda: True)
    cuda_build.setattr(engine.startup.device_choice, "HAS_TRITON", False)
    assert resolve_device("auto").type == "cuda"
    assert "falls back to torch" in caplog.text


@pytest.mark.parametrize(
    ("change", "block_size", "words"),
    [({}, 24, "block_size 24"), ({"caches": (LayerCache(2, 64, 64), LayerCache(2, 640, 640))}, None, "head_dim 640")],
)
def test_a_shape_that_no_backend_takes_is_a_named_error(change: dict, block_size: int | None, words: str) -> None:
    pytest.importorskip("triton")
    model = dataclasses.replace(ModelConfig.from_folder(DEMO), **change)
    config = EngineConfig(model=str(DEMO), attention_backend="triton", block_size=block_size)
    with pytest.raises(StartupError, match=f"no attention backend supports this model: triton: {words}") as info:
        _select_backend(config, model, torch.bfloat16, torch.device("cuda"))
    assert info.value.exit_code == 3


def test_auto_on_the_cpu_is_bf16_for_large_16_bit_checkpoints_on_a_cpu_that_multiplies_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = ModelConfig.from_folder(SHAPES / "qwen3-0.6b")
    cpu, bf16, fp32 = torch.device("cpu"), torch.bfloat16, torch.float32
    for has_bf16 in (True, False):
        monkeypatch.setattr(engine.startup.device_choice, "has_bf16_products", lambda found=has_bf16: found)
        assert resolve_dtype("auto", large, cpu) == (bf16 if has_bf16 else fp32)
        assert resolve_dtype("auto", dataclasses.replace(large, dtype="float16"), cpu) == (bf16 if has_bf16 else fp32)
        assert resolve_dtype("auto", dataclasses.replace(large, dtype="float32"), cpu) == fp32
        assert resolve_dtype("auto", ModelConfig.from_folder(DEMO), cpu) == fp32
        assert resolve_dtype("float16", large, cpu) == torch.float16
        assert resolve_dtype("float32", large, cpu) == fp32


def test_a_copy_of_the_head_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.startup.device_choice, "has_bf16_products", lambda: True)
    model, cpu = ModelConfig.from_folder(SHAPES / "qwen3-0.6b"), torch.device("cpu")
    rows = 151_936 * 1024
    assert head_copy_bytes(model, torch.bfloat16, cpu) == 2 * rows
    assert head_copy_bytes(model, torch.float32, cpu) == 0
    assert head_copy_bytes(dataclasses.replace(model, tie_word_embeddings=False), torch.bfloat16, cpu) == 0
    assert head_copy_bytes(model.quantized("w8a8"), torch.bfloat16, torch.device("cuda")) == rows
