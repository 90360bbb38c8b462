"""How long to fuzz, and the corpus. Each file of it is tried by name; hypothesis goes on from there."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz import counts

CORPUS = Path(__file__).parent / "corpus"

for name, max_examples in (("fuzz", 1000), ("long", 50_000)):
    settings.register_profile(
        name, max_examples=max_examples, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
    )


_BEGUN_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-json", type=Path, help="write what was sent, and what came back, to this file")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--fuzz-json")
    if path is not None:
        found = counts.report(
            max_examples=settings.default.max_examples,
            seconds=time.monotonic() - _BEGUN_S,
            num_failed=session.testsfailed,
        )
        counts.write(path, found)


def seeds(kind: str) -> list[Path]:
    """Return the corpus's files of one kind, in order."""
    found = sorted(path for path in (CORPUS / kind).iterdir())
    assert found
    return found
