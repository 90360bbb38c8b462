"""Shared by the integration tests: daemons with the demo model, one for each set of flags, and clients for them."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.support.certificates import certificates_read_once
from tests.support.daemon import Daemon, own_daemons

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    with certificates_read_once():
        yield


@pytest.fixture(scope="session")
def daemon_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Daemon]]:
    """Return a function that gives the ready daemon of some flags, which all tests of this process share.

    A test that kills, overloads or reconfigures one starts its own, and none counts on being the first to ask.
    """
    running: dict[tuple[str, ...], Daemon] = {}
    with contextlib.ExitStack() as stack:

        def daemon_of(*flags: str) -> Daemon:
            if flags not in running:
                folder = tmp_path_factory.mktemp("daemon")
                running[flags] = stack.enter_context(Daemon("--device", "cpu", *flags, folder=folder))
            return running[flags].wait_ready()

        yield daemon_of


@pytest.fixture(scope="session")
def daemon(daemon_with: Callable[..., Daemon]) -> Daemon:
    """Return the daemon without further flags."""
    return daemon_with()


@pytest.fixture(scope="session")
def client_with(daemon_with: Callable[..., Daemon]) -> Iterator[Callable[..., openai.OpenAI]]:
    """Return a function that gives the real client of the daemon of some flags; it does not retry: errors show."""
    with contextlib.ExitStack() as stack:

        def client_of(*flags: str) -> openai.OpenAI:
            url = f"{daemon_with(*flags).base_url}/v1"
            return stack.enter_context(openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60))

        yield client_of


@pytest.fixture(scope="session")
def client(client_with: Callable[..., openai.OpenAI]) -> openai.OpenAI:
    """Return the real client of the daemon without further flags."""
    return client_with()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts a daemon of the test's own, ended after it."""
    with own_daemons(tmp_path) as start_one:
        yield start_one
