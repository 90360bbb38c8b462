"""docs/reference/flags.md is what the flags say."""

from server.cli import serve_parser
from tests.configuration_page import PAGE, page


def test_the_page_is_not_stale():
    assert page() == PAGE.read_text(encoding="utf-8"), "run make configuration-page"


def test_every_setting_has_a_full_row():
    text = PAGE.read_text(encoding="utf-8")
    for setting in serve_parser({}).settings:
        (row,) = [line for line in text.splitlines() if line.startswith("|") and f"| `{setting.variable}` |" in line]
        cells = [cell.strip() for cell in row.split(" | ")]
        assert len(cells) == 6
        assert setting.flag in cells[0]
        assert all(cell not in ("", "–") for cell in cells[:5])
