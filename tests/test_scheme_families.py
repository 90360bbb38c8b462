"""The table of schemes × families on docs/reference/models.md is that of its sources."""

import json
from pathlib import Path

import pytest

from models.config.model_config import ModelConfig
from tests.models_page import MISSING, PAGE
from tests.scheme_families import ROWS, SHAPES, measure, page, read_bytes, table_rows


def test_the_page_has_the_table_of_the_newest_results() -> None:
    assert PAGE.read_text() == page()


def test_every_row_has_errors_and_every_published_shape_of_quantized_experts_is_in_one(tmp_path: Path) -> None:
    rows = [row.split(" | ") for row in table_rows()]
    assert not any(MISSING in row[2] or MISSING in row[3] for row in rows)
    assert all(float(cell) < 1e-5 for row in rows for cell in row[2:4])
    configs = {path.parent.name: ModelConfig.from_folder(path.parent) for path in SHAPES.glob("*/config.json")}
    quantized = {name for name, config in configs.items() if config.experts and config.quantization}
    assert quantized == {shape for row in ROWS for shape in row.shapes}


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    (tmp_path / "experts-errors-cpu-2026-01-01.json").write_text(json.dumps({"rows": {}}))
    rows = table_rows(tmp_path)
    assert all(row.count(MISSING) == (4 if "floor" in row else 5) for row in rows)


@pytest.mark.parametrize(
    ("shape", "gb"), [("qwen3-30b-a3b", 6.1), ("qwen3-30b-a3b-fp8", 3.4), ("llama-3.1-8b-fp8-blocks", 8.0)]
)
def test_a_token_reads_its_experts_and_no_embedding(shape: str, gb: float) -> None:
    """The floors of docs/explanation/performance.md, at 3.01 TB/s: 2.02, 1.12 and 2.67 ms."""
    assert read_bytes(ModelConfig.from_folder(SHAPES / shape)) / 1e9 == pytest.approx(gb, rel=0.02)


def test_an_error_is_that_of_the_packed_checkpoint(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.scheme == "nvfp4")
    found = measure(row, tmp_path)
    assert found["describe"].startswith("nvfp4")
    assert found["logits_error"] < 1e-5
