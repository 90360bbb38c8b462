"""A directory for the sockets of daemons."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:  # tmp_path is made before
    """Return a short directory for temporary files, without other daemons in it."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
