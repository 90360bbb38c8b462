"""The table of whole models on docs/explanation/performance.md is that of the newest results."""

from pathlib import Path

from tests.model_speeds import PAGE, ROWS, Row, page
from tests.models_page import MISSING
from tests.speed_cells import measured_cells, newest, read

RESULTS = Path("benchmarks/results")


def test_the_page_has_the_table_of_the_newest_results() -> None:
    assert PAGE.read_text() == page()


def test_a_later_run_gives_the_workloads_that_it_has() -> None:
    row = next(row for row in ROWS if isinstance(row, Row) and len(row.names) > 1)
    first, last = (newest(RESULTS, name, row.card.lower()) for name in (row.names[0], row.names[-1]))
    assert first is not None
    assert last is not None
    whole, part = measured_cells([read(first)]), measured_cells([read(last)])
    both = measured_cells([read(first), read(last)])
    assert MISSING in part
    assert both == [old if new == MISSING else new for old, new in zip(whole, part, strict=True)]
