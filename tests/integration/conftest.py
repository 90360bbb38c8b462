"""Shared by the integration tests: one daemon with the demo model per module, and clients for it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.support.daemon import Daemon

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Return a ready daemon on CPU with the demo model. Tests that kill or configure it start their own."""
    with Daemon("--device", "cpu", folder=tmp_path_factory.mktemp("daemon")) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    """Return the real client; it does not retry, so that errors show."""
    with openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="unused", max_retries=0, timeout=60) as openai_client:
        yield openai_client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts a daemon of the test's own, ended after it."""
    started: list[Daemon] = []

    def start_one(*arguments: str) -> Daemon:
        started.append(Daemon("--device", "cpu", *arguments, folder=tmp_path))
        return started[-1]

    yield start_one
    for running in started:
        running.__exit__()
