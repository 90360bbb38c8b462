"""A standby rehearses its takeover with a small model where the device has room beside the engine that serves."""

import logging
from pathlib import Path

import pytest
import torch

from engine.interface.config import EngineConfig
from engine.interface.units import GIB
from engine.offline import OfflineEngine
from engine.startup import load, rehearsal
from engine.startup.loaded_engine import LoadedEngine
from tests.support.tiny_llama import save_tiny_llama


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """One of a device that is taken for a GPU with 8 GiB left."""
    monkeypatch.setattr(rehearsal, "_can_rehearse", lambda setup: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(rehearsal, "_POOL_BYTES", 2**20)
    return EngineConfig(model=str(save_tiny_llama(tmp_path)), device="cpu", max_num_seqs=4, max_num_batched_tokens=64)


def test_a_small_model_serves_and_ends(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served: list[LoadedEngine] = []

    def serve(loaded: LoadedEngine) -> None:
        OfflineEngine(loaded).self_test()
        served.append(loaded)

    assert load.rehearse(config, serve)
    (loaded,) = served
    assert loaded.plan.num_bytes <= 2**20
    assert not hasattr(loaded.runner, "_model")
    assert "standby rehearsed seconds=" in caplog.text


def test_without_room_nothing_is_loaded(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    assert not load.rehearse(config, lambda loaded: pytest.fail("it was loaded"))
    assert "standby rehearses nothing free='1 GiB'" in caplog.text


def test_a_failure_is_logged_and_the_standby_waits_all_the_same(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(loaded: LoadedEngine) -> None:
        raise RuntimeError("CUDA out of memory")

    assert not load.rehearse(config, fail)
    assert "standby's rehearsal failed: RuntimeError: CUDA out of memory" in caplog.text


def test_on_a_cpu_there_is_nothing_to_rehearse(tmp_path: Path) -> None:
    config = EngineConfig(model=str(save_tiny_llama(tmp_path)), device="cpu")
    assert not load.rehearse(config, lambda loaded: pytest.fail("it was loaded"))
