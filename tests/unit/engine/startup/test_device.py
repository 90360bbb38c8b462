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
from engine.startup.device_choice import resolve_device
from engine.startup.load import _select_backend
from models.config.layer_cache import LayerCache
from models.config.model_config import ModelConfig

DEMO = Path(__file__).parents[4] / "models" / "demo" / "checkpoint"
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
