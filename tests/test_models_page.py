"""docs/models.md has every architecture that is served, and no cell is empty."""

from models.registry import ARCHITECTURES
from tests.models_page import FAMILIES, PAGE, TEXT_PARTS
from tests.unit.models.checkpoints import make_configs


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
        assert not {"**not run**", "**differs**"} & {cell.strip() for cell in row}
