"""`quire doctor` on published mixtures: their sizes are those of their files, and they fit their cards."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.interface.fit_report import Ask
from engine.startup.fit import examine
from models.config.model_config import ModelConfig
from models.weights.checkpoint import folder_stats
from tests.support.header_files import entries_of, save_headers

SHAPES = Path(__file__).parents[4] / "benchmarks" / "shapes"
GB, GIB = 10**9, 2**30


@pytest.mark.parametrize(
    ("shape", "card_gib", "gb"),
    [("gpt-oss-120b-mxfp4", 80, 65.25), ("qwen3-30b-a3b-fp8", 40, 31.17), ("glm-4.5-air-int4", 80, 61.92)],
)
def test_a_published_mixture_fits_its_card(tmp_path: Path, shape: str, card_gib: int, gb: float) -> None:
    """gb: of all tensors in the published layout. On the device experts in planes are padded, gpt-oss's by 2 %."""
    (tmp_path / "config.json").write_text((SHAPES / shape / "config.json").read_text())
    save_headers(tmp_path, entries_of(ModelConfig.from_folder(tmp_path)), num_files=3)
    stored = folder_stats(tmp_path)
    assert stored is not None
    model = examine(Ask(folder=str(tmp_path), device="cuda", gpu_memory=card_gib * GIB)).model
    assert model is not None
    assert model.problem is None
    assert model.room is not None
    assert stored.num_bytes / GB == pytest.approx(gb, rel=1e-3)
    assert model.weights == pytest.approx(stored.num_bytes, rel=0.025)
    assert model.weights + model.room.step + model.room.kv_cache <= model.room.usable
    assert model.room.num_requests[8192] >= 1
