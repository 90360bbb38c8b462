"""A checkpoint for tests of graphs, all of whose models are the same tiny Llama."""

from pathlib import Path

import pytest

from tests.support.tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return its folder, which no test changes."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
