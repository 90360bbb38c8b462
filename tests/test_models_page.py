"""docs/reference/models.md has every architecture that is served, and no cell is empty."""

import json
from pathlib import Path

from benchmarks.quantization_schemes import SCHEMES
from models.registry import ARCHITECTURES
from tests.models_page import FAMILIES, MISSING, PAGE, TEXT_PARTS, scheme_rows
from tests.support.checkpoints import make_configs


def test_every_architecture_and_every_checkpoint_has_its_row() -> None:
    assert {family.architecture for family in FAMILIES} | set(TEXT_PARTS) == set(ARCHITECTURES)
    assert sorted(name for family in FAMILIES for name in family.checkpoints) == sorted(make_configs())
    text = PAGE.read_text()
    for architecture in ARCHITECTURES:
        assert f"`{architecture}`" in text


def test_no_cell_is_empty_or_shows_a_fault() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert len(rows) > len(FAMILIES)
    for row in rows:
        assert all(cell.strip() for cell in row)
        assert not {"**not run**", "**differs**", MISSING} & {cell.strip() for cell in row}


def test_the_page_has_the_newest_measurements_of_every_scheme() -> None:
    lines = PAGE.read_text().splitlines()
    start, end = lines.index("<!-- schemes -->"), lines.index("<!-- end of schemes -->")
    assert lines[start + 3 : end] == scheme_rows()
    assert len(SCHEMES) == end - start - 3


def save(folder: Path, name: str, **report: object) -> None:
    (folder / f"quantization-{name}.json").write_text(json.dumps(report))


def test_a_scheme_has_what_was_measured_of_it_and_the_rest_is_said_to_be_missing(tmp_path: Path) -> None:
    awq = {"describe": "awq (groups of 128)", "weights_gib": 5.4, "errors": {"a": 0.1, "b": 0.2}}
    awq |= {"decode_tok_per_s": {"1": 437.6, "8": 3171.8}}
    save(tmp_path, "z-old", benchmark="quantization", date="2026-01-01", schemes={"awq": awq | {"weights_gib": 9.0}})
    schemes = {"awq": awq, "nf4": {"failed": "no"}}
    save(tmp_path, "a-new", benchmark="quantization", date="2026-02-01", schemes=schemes)
    trained = {"describe": "awq (groups of 64)", "errors": {"a": 0.03}, "logits_error": 0.05, "kl": 0.002}
    schemes = {"awq": trained | {"same_tokens": 0.99}, "fp8": {"failed": "no"}}
    save(tmp_path, "trained", benchmark="quantization-trained", date="2026-03-01", schemes=schemes)
    rows = scheme_rows(tmp_path)
    assert len(rows) == len(SCHEMES)
    assert (
        "| awq (groups of 128) | 20.00 % | 3.00 % (groups of 64) | 5.00 % | 0.00200 | 99.00 % | 5.40 | 438 / 3,172 |"
        in rows
    )
    for name in ("nf4", "fp8"):
        assert f"| {' | '.join([name] + [MISSING] * 7)} |" in rows
