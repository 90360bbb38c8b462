"""docs/reference/models.md has every architecture that is served, and no cell is empty."""

import json
from pathlib import Path

import pytest

from benchmarks.quantization_schemes import SCHEMES
from models.registry import ARCHITECTURES
from tests.models_memory import memory_cells, memory_rows
from tests.models_page import (
    FAMILIES,
    LOGITS,
    MISSING,
    NOT_RUN,
    PAGE,
    TEXT_PARTS,
    Recorder,
    family_rows,
    forms_found,
    rounded_up,
    scheme_rows,
)
from tests.support import templates
from tests.support.checkpoints import make_configs
from tests.support.published_shapes import published_shapes
from tests.support.reference import LOGITS_ERROR
from tests.unit.models.test_tensor_parallel import FOUR_RANKS, TWO_RANKS

LOGITS_TEST = "tests/unit/models/config/test_logits.py::test_whole_prefill_matches_transformers"


def test_every_architecture_and_every_checkpoint_has_its_row() -> None:
    assert {family.architecture for family in FAMILIES} | set(TEXT_PARTS) == set(ARCHITECTURES)
    assert sorted(name for family in FAMILIES for name in family.checkpoints) == sorted(make_configs())
    text = PAGE.read_text()
    for architecture in ARCHITECTURES:
        assert f"`{architecture}`" in text


def test_every_family_is_split_over_two_and_over_four_ranks() -> None:
    """As the page says of each."""
    configs = make_configs()
    for table in (TWO_RANKS, FOUR_RANKS):
        kinds = {type(config) for config in table.values()}
        assert [
            family.models for family in FAMILIES if not {type(configs[name]) for name in family.checkpoints} & kinds
        ] == []


def test_no_cell_is_empty_or_shows_a_fault() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert len(rows) > len(FAMILIES)
    for row in rows:
        assert all(cell.strip() for cell in row)
        assert not {NOT_RUN, "**differs**"} & {cell.strip() for cell in row}
    schemes = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows_of("schemes")]
    # speeds need a GPU; the errors on trained weights do not
    assert not any(MISSING in row[2:6] for row in schemes)
    families = rows_of("scheme families")  # tests/test_scheme_families.py
    num_missing = sum(MISSING in row for row in schemes) + sum(MISSING in row for row in families)
    assert sum(any(MISSING in cell for cell in row) for row in rows) == num_missing


def rows_of(table: str) -> list[str]:
    lines = PAGE.read_text().splitlines()
    return lines[lines.index(f"<!-- {table} -->") + 3 : lines.index(f"<!-- end of {table} -->")]


def report(checkpoint: str, *errors: float, outcome: str = "passed") -> pytest.TestReport:
    properties: list[tuple[str, object]] = [(LOGITS_ERROR, error) for error in errors]
    node = f"{LOGITS_TEST}[{checkpoint}]"
    return pytest.TestReport(
        node, ("", 0, ""), {}, outcome=outcome, longrepr=None, when="call", user_properties=properties
    )


def test_the_largest_error_over_all_checkpoints_is_shown() -> None:
    seen = Recorder()
    for made in (report("a", 1e-7, 1.2e-6), report("a", 2e-7), report("b", 3e-7), report("c")):
        seen.pytest_runtest_logreport(made)
    assert seen.largest_error(["a", "b"]) == "2e-6"
    assert seen.largest_error(["b"]) == "5e-7"
    assert seen.largest_error(["b", "c"]) == NOT_RUN  # it passed, but left no error
    assert seen.count(LOGITS, ["a", "b", "c"]) == "3"
    seen.pytest_runtest_logreport(report("b", 3e-3, outcome="failed"))
    assert (seen.count(LOGITS, ["b"]), seen.largest_error(["b"])) == ("**differs**", "5e-3")


@pytest.mark.parametrize(
    ("error", "text"),
    [(0.0, "0"), (1e-6, "1e-6"), (1.1e-6, "2e-6"), (2.1e-6, "5e-6"), (5.1e-6, "1e-5"), (9.9999999e-7, "1e-6")],
)
def test_errors_are_rounded_up_so_that_machines_agree(error: float, text: str) -> None:
    assert rounded_up(error) == text


def test_forms_are_those_that_detection_finds_in_the_templates(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.jinja" for name in ("coder", "plain", "harmony", "qwen")}
    sources = (templates.QWEN_CODER_LIKE, templates.CHATML, templates.HARMONY_LIKE, templates.QWEN3_LIKE)
    for path, source in zip(paths.values(), sources, strict=True):
        path.write_text(source)
    assert forms_found([paths["plain"]]) == ["none", "none"]
    assert forms_found([paths["coder"], paths["plain"], paths["qwen"]]) == ["`hermes`, `qwen_xml`", "`<think>`"]
    (row,) = [row for row in family_rows(Recorder(), {"gptoss": paths["harmony"]}) if "`GptOssForCausalLM`" in row]
    assert f"{NOT_RUN} | `harmony` | `<\\|channel\\|>analysis<\\|message\\|>` |" in row


def test_every_row_says_whether_there_is_a_template() -> None:
    assert [family for family in FAMILIES if bool(family.templates) == bool(family.form)] == []
    assert all(row.count("no template") in (0, 2) for row in rows_of("families"))


def test_the_page_has_the_memory_of_every_family() -> None:
    assert rows_of("memory") == memory_rows(family.architecture for family in FAMILIES)
    missing = {family.architecture for family in FAMILIES} - set(published_shapes())
    assert missing == {"Gemma4UnifiedForCausalLM", "GraniteMoeSharedForCausalLM"}  # nobody downloads one


def test_published_shapes_have_as_many_parameters_as_published() -> None:
    for shape in published_shapes().values():
        assert shape.config.num_parameters / 1e9 == pytest.approx(shape.billions, rel=5e-3), shape.name


@pytest.mark.parametrize(
    ("architecture", "cells"),
    [
        ("Gemma4", [f"{10 * 4 * 512 * 4:,}", f"{50 * 16 * 256 * 4:,} within 1,024 tokens", "–"]),
        ("GptOss", [f"{12 * 8 * 64 * 4:,}", f"{12 * 8 * 64 * 4:,} within 128 tokens", "–"]),
        ("Mistral", ["–", f"{32 * 8 * 128 * 4:,} within 4,096 tokens", "–"]),
        ("Llama4", [f"{12 * 8 * 128 * 4:,}", f"{36 * 8 * 128 * 4:,} within chunks of 8,192 tokens", "–"]),
        # its report: windows in three of four layers
        ("Mellum", [f"{7 * 4 * 128 * 4:,}", f"{21 * 4 * 128 * 4:,} within 1,024 tokens", "–"]),
        # a convolution of 2 × 16 × 128 + 32 × 128 channels, and 32 states of 128 × 128, in float32
        ("Qwen3Next", [f"{12 * 2 * 256 * 4:,}", "–", f"{36 * 4 * (8192 * 3 + 32 * 128 * 128):,}"]),
        # three convolutions of 32 × 128 channels, and 32 states of 128 × 128, in float32
        ("KimiLinear", [f"{7 * 576 * 2:,}", "–", f"{20 * 4 * (3 * 4096 * 3 + 32 * 128 * 128):,}"]),
        ("Lfm2", [f"{6 * 8 * 64 * 4:,}", "–", f"{10 * 2048 * 2 * 4:,}"]),
    ],
)
def test_memory_is_counted_by_kind(architecture: str, cells: list[str]) -> None:
    assert memory_cells(published_shapes()[f"{architecture}ForCausalLM"].config) == cells


def test_the_page_has_the_newest_measurements_of_every_scheme() -> None:
    assert rows_of("schemes") == scheme_rows()
    assert len(SCHEMES) == len(scheme_rows())


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
