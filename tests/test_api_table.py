"""docs/api-tests.md names tests that exist: a rule whose test was renamed or removed is found here."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
FOLDERS = {
    "i": "integration",
    "b": "browser",
    "c": "clients",
    "c/openai2": "clients/openai2",
    "fuzz": "fuzz",
    "": "",
    None: "unit/server",
}
NAMES = re.findall(r"`([\w/]+)::(test_\w+)`", (ROOT.parent / "docs" / "api-tests.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("place", "name"), sorted(set(NAMES)), ids=lambda part: part)
def test_a_named_test_exists(place, name):
    folder, slash, file = place.rpartition("/")
    path = ROOT / FOLDERS[folder if slash else None] / f"test_{file}.py"
    assert f"def {name}(" in path.read_text(encoding="utf-8")
