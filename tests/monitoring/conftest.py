"""One daemon under load and a Prometheus that watches it, for the whole session."""

import time
from collections.abc import Iterator

import pytest

from tests.monitoring.load import FLAGS, burst, running
from tests.monitoring.prometheus import IS_INSTALLED, Prometheus
from tests.support.daemon import Daemon

_LOAD_S = 25


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    if not IS_INSTALLED:
        pytest.exit("prometheus and promtool are not installed (on Debian: apt-get install prometheus).", returncode=2)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Return a ready daemon with a small pool and a short queue."""
    with Daemon(*FLAGS, folder=tmp_path_factory.mktemp("daemon")) as started:
        yield started.wait_ready()


@pytest.fixture(scope="session")
def prometheus(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Return a Prometheus that has watched the daemon under load; the load is over."""
    with Prometheus(daemon.base_url.removeprefix("http://"), folder=tmp_path_factory.mktemp("prometheus")) as started:
        with running(daemon.base_url, num_readers=8):
            time.sleep(_LOAD_S / 2)
            assert 429 in burst(daemon.base_url)
            time.sleep(_LOAD_S / 2)
        time.sleep(2)  # two scrapes
        yield started
