"""One real daemon with the demo model for all clients, started as a user would, in the server's own environment."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.daemon import ROOT, Daemon

MODEL = "quire-demo"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server-python", default=str(ROOT / ".venv/bin/python"), help="interpreter that has Quire")
    parser.addoption("--model", default=None, help="folder of a checkpoint; default: the built-in demo")


@pytest.fixture(scope="session")
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that makes a Daemon with some flags."""

    def make(*arguments: str) -> Daemon:
        model = request.config.getoption("model")
        return Daemon(
            *((model,) if model else ()),
            *("--device", "cpu", "--served-model-name", MODEL, *arguments),
            folder=tmp_path_factory.mktemp("daemon"),
            command=(request.config.getoption("server_python"), "-m", "server"),
            env={"PYTHONPATH": str(ROOT)},
        )

    return make


@pytest.fixture(scope="session")
def daemon(start) -> Iterator[Daemon]:
    """Return the daemon that all tests share; none of them harms it."""
    with start() as daemon:
        yield daemon.wait_ready()


@pytest.fixture(scope="session")
def base_url(daemon: Daemon) -> str:
    """Return what OpenAI's clients want to be told."""
    return f"{daemon.base_url}/v1"


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    """Return OpenAI's client, told to hold every answer against its own types."""
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True)


@pytest.fixture
def settings(base_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set what clients read from the environment; return a folder for what they keep at home."""
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    monkeypatch.setenv("OPENAI_API_BASE", base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path
