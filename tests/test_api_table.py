"""docs/api-tests.md names tests that exist: a rule whose test was renamed or removed is found here."""

import re
from pathlib import Path

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


def test_every_named_test_exists():
    missing = []
    for place, name in sorted(set(NAMES)):
        folder, slash, file = place.rpartition("/")
        path = ROOT / FOLDERS[folder if slash else None] / f"test_{file}.py"
        if not path.exists() or f"def {name}(" not in path.read_text(encoding="utf-8"):
            missing.append(f"{place}::{name}")
    assert NAMES
    assert missing == []
