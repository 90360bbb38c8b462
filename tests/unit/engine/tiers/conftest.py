"""Stores on disk that are closed at the end of a test."""

import contextlib

import pytest

from tests.unit.engine.tiers.opened_store import Opened


@pytest.fixture
def open_store(tmp_path):
    with contextlib.ExitStack() as stack:

        def open_one(**settings):
            opened = Opened(tmp_path, **settings)
            stack.callback(opened.store.close)
            return opened

        yield open_one
