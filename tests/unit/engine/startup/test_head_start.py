"""Work that begins before torch is imported: it never fails, and reads a checkpoint only if memory has room for it."""

import json
from pathlib import Path

import pytest

from engine.interface.config import EngineConfig
from engine.startup import head_start


def test_the_weights_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "model-2.safetensors").write_bytes(b"y" * 500)
    (tmp_path / "consolidated.safetensors").write_bytes(b"z" * 1500)  # the same weights again, which nothing loads
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert head_start.read_ahead(tmp_path) == 1500


def test_a_single_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 700)
    assert head_start.read_ahead(tmp_path) == 700


def test_a_checkpoint_larger_than_memory_is_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    monkeypatch.setattr(head_start, "_available_bytes", lambda: 1200)
    assert head_start.read_ahead(tmp_path) == 0


def test_a_folder_that_is_not_there_fails_where_it_is_loaded(tmp_path: Path) -> None:
    assert head_start.read_ahead(tmp_path / "nothing") == 0


def test_random_weights_on_a_cpu_need_no_head_start(tmp_path: Path) -> None:
    assert head_start.begin_head_start(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy")) == []
    (thread,) = head_start.begin_head_start(EngineConfig(model=str(tmp_path), device="cpu"))
    thread.join(10)
    assert not thread.is_alive()


def test_a_machine_without_a_driver_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(head_start.ctypes, "CDLL", fail)
    assert not head_start.create_context()
