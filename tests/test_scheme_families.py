"""The table of schemes × families on docs/reference/models.md is that of its sources."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.floors import SHAPES
from models.config.model_config import ModelConfig
from tests.models_page import MISSING, PAGE
from tests.scheme_families import ROWS, measure, page, table_rows


@pytest.fixture(scope="module")
def rows() -> list[str]:
    return table_rows()


def test_the_page_has_the_table_of_the_newest_results() -> None:
    assert PAGE.read_text() == page()


def test_every_row_has_errors_and_every_published_shape_of_quantized_experts_is_in_one(rows: list[str]) -> None:
    cells = [row.split(" | ") for row in rows]
    assert not any(MISSING in row[2] or MISSING in row[3] for row in cells)
    assert all(float(cell) < 1e-5 for row in cells for cell in row[2:4])
    configs = {path.parent.name: ModelConfig.from_folder(path.parent) for path in SHAPES.glob("*/config.json")}
    quantized = {name for name, config in configs.items() if config.experts and config.quantization}
    assert quantized == {shape for row in ROWS for shape in row.shapes}


def test_what_was_not_measured_is_said_beside_its_floor(tmp_path: Path) -> None:
    (tmp_path / "experts-errors-cpu-2026-01-01.json").write_text(json.dumps({"rows": {}}))
    rows = [row.split(" | ") for row in table_rows(tmp_path)]
    assert all([cell.startswith(MISSING) for cell in row[7:]] == [True] * 4 for row in rows)
    assert all(float(row[7].removeprefix(f"{MISSING} · ")) > 0.4 for row in rows)  # single, ms
    cards = {row[4].split("`")[1]: row[5] for row in rows}
    assert [shape for shape, card in cards.items() if card != "H100"] == ["glm-4.5-air-fp8"]


def test_shapes_with_fewer_layers_say_so(rows: list[str]) -> None:
    parts = [row for row in rows if "-layers-" in row]
    assert len(parts) >= 3
    assert all(re.search(r"; (\d+) of 6[12] layers \|", row) for row in parts)


def test_a_published_form_that_differs_from_the_small_checkpoint_is_named(rows: list[str]) -> None:
    found = [row for row in rows if "qwen3-30b-a3b-gptq-int8" in row]
    assert found
    assert all(row.startswith("| gptq (8-bit integers, groups of 32) |") for row in found)
    assert all("; gptq (8-bit integers, groups of 128) |" in row for row in found)


def test_an_error_is_that_of_the_packed_checkpoint(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.scheme == "nvfp4")
    found = measure(row, tmp_path)
    assert found["describe"].startswith("nvfp4")
    assert found["logits_error"] < 1e-5
