"""Which models have the kernels in C, in a loaded engine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import models
from engine.interface.config import EngineConfig
from engine.interface.protocol import SamplingParams
from engine.offline import OfflineEngine
from engine.startup import load
from kernels.native import library
from kernels.native.library import products_level

DEMO = Path(models.__file__).parent / "demo" / "checkpoint"


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    library.unload()


def generate(dtype: str) -> tuple[list[int], dict[str, str]]:
    """Return a greedy answer of the demo model, and the panel's rows."""
    config = EngineConfig(model=str(DEMO), device="cpu", dtype=dtype, max_model_len=256, max_num_seqs=2)
    engine = OfflineEngine.load(config)
    with contextlib.closing(engine.loaded):
        params = SamplingParams(max_tokens=8, temperature=0.0)
        long, _ = engine.generate([list(range(5, 45)), [7, 8]], [params, params])
        assert long.error is None
        return long.token_ids, engine.loaded.facts


def test_a_large_model_in_bfloat16_is_served_by_kernels_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler on this machine")
    expected, facts = generate("bfloat16")
    assert "kernels in C" not in facts["Device"]  # the demo model is small
    assert "Decode" not in facts
    monkeypatch.setattr(load, "SMALL_PARAMETERS", 0)
    found, facts = generate("bfloat16")
    assert "kernels in C" in facts["Device"]
    if products_level():
        assert facts["Decode"].endswith("rows have all layers in one call in C")
    assert found[:2] == expected[:2]  # later ones may differ by roundings


def test_float32_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SMALL_PARAMETERS", 0)
    _, facts = generate("float32")
    assert "kernels in C" not in facts["Device"]
    assert "Decode" not in facts
