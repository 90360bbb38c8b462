"""Shared by the deployment's tests: demo servers on free ports, and programs of the system that must be there."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, own_daemons

_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def need(program: str, *, package: str | None = None) -> str:
    """Return a program's path, or fail the test: Debian has it as `package`, or else our extra `deploy` does."""
    path = shutil.which(program, path=_PATH)
    if path is None:
        remedy = (
            f"apt-get install -y {package}" if package else "make test-deploy installs it (pip install -e '.[deploy]')"
        )
        pytest.fail(f"{program} is missing: {remedy}", pytrace=False)
    return path


def need_module(name: str) -> None:
    """Fail unless this Python has a module: skipped tests would say that all of it works."""
    if importlib.util.find_spec(name) is None:
        pytest.fail(f"the module {name} is missing: make test-deploy installs it", pytrace=False)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts, and runs as other users")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Return a ready daemon on CPU with the demo model."""
    with Daemon("--device", "cpu", folder=tmp_path_factory.mktemp("daemon")) as running:
        yield running.wait_ready()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts a daemon of the test's own, ended after it."""
    with own_daemons(tmp_path) as start_one:
        yield start_one
