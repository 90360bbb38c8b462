"""benchmarks/results: every file that a page names is there, every file that is there is named, one for each row."""

import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted(path.name for path in (ROOT / "benchmarks/results").iterdir())
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/notes.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
_NAMED = re.compile(r"\bresults/([\w.*{},-]*[\w*}])")
_FOLDER = re.compile(r"(?:^|[\s=\"'])/(?:tmp|root|home|work|mnt|var|opt|Users)/")
_DATE = re.compile(r"-\d{4}-\d\d-\d\d\.")


def expanded(pattern: str) -> Iterator[str]:
    """Yield what a pattern with {a,b} stands for."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    yield from map("".join, product(*(part.split(",") if at % 2 else [part] for at, part in enumerate(parts))))


def named() -> list[tuple[str, str]]:
    """Return (page, pattern) of every file of results that a page names, by its whole name or with `*` and braces."""
    return [
        (page.relative_to(ROOT).as_posix(), pattern)
        for page in PAGES
        for written in _NAMED.findall(page.read_text(encoding="utf-8"))
        for pattern in expanded(written)
    ]


def test_a_pattern_with_braces_stands_for_each() -> None:
    assert list(expanded("a-{b,c}-{d,e}.json")) == ["a-b-d.json", "a-b-e.json", "a-c-d.json", "a-c-e.json"]
    assert list(expanded("a-*.json")) == ["a-*.json"]


def test_every_file_that_a_page_names_is_there() -> None:
    patterns = named()
    assert len(patterns) > 30
    dead = [
        f"{page}: results/{pattern}"
        for page, pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in FILES)
    ]
    assert dead == []


def test_every_file_is_named_by_a_page() -> None:
    patterns = {pattern for _, pattern in named()}
    assert [name for name in FILES if not any(fnmatchcase(name, pattern) for pattern in patterns)] == []


def test_a_measurement_has_one_file_the_newest() -> None:
    counts = Counter(_DATE.sub(".", name) for name in FILES)
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_file_names_a_folder_of_the_machine_that_measured() -> None:
    assert _FOLDER.search('"argv": "--out /tmp/x/a.json"')
    assert _FOLDER.search('"argv": "/root/out --table"')
    texts = {name: (ROOT / "benchmarks/results" / name).read_bytes() for name in FILES}
    found = [name for name, text in texts.items() if _FOLDER.search(text.decode(errors="replace"))]
    assert found == []
