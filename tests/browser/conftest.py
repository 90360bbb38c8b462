"""A real Chromium for the pages. Without one, or without playwright, the tests are skipped and say why."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.support.daemon import Daemon, own_daemons

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra `browser` (make test-browser installs it)"
)

NAMES = ("chromium", "google-chrome-stable", "google-chrome", "chrome", "chromium-browser")  # the last may be a stub
# as root there is no sandbox, and a container's /dev/shm is small
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--force-prefers-reduced-motion"]
# what is awaited takes a fraction of a second, but some seconds where others use the machine
_TIMEOUT_MS = 20_000
sync_api.expect.set_options(timeout=_TIMEOUT_MS)


def find_chromium() -> str | None:
    """Return the path of an installed Chromium."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator["sync_api.Browser"]:
    """Return one browser for all tests; each has a context of its own."""
    path = find_chromium()
    if path is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(NAMES)}; on Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: "sync_api.Browser") -> Iterator[Callable[..., "sync_api.Page"]]:
    """Return a function that opens an address in a new context. Any error in the console fails the test."""
    contexts, complaints = [], []

    def complain(message: "sync_api.ConsoleMessage") -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # which says any 401 aloud
            complaints.append(message.text)

    def open_one(url: str, **settings: object) -> "sync_api.Page":
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        context.set_default_timeout(_TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", complain)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Return a ready daemon with a pool small enough to see."""
    flags = ["--device", "cpu", "--kv-cache-memory", "20MiB", "--max-model-len", "2048"]
    with Daemon(*flags, folder=tmp_path_factory.mktemp("daemon")) as running:
        yield running.wait_ready()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts a daemon of the test's own."""
    with own_daemons(tmp_path) as start_one:
        yield start_one


@pytest.fixture
def generate(daemon: Daemon) -> Iterator[Callable[[str], "openai.Stream"]]:
    """Return a function that starts a long completion and returns its stream and id, ended after the test."""
    client = openai.OpenAI(base_url=f"{daemon.base_url}/v1", api_key="none", max_retries=0, timeout=60)
    streams = []

    def start_one(prompt: str) -> tuple["openai.Stream", str]:
        stream = client.completions.create(
            model="quire-demo", prompt=prompt, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        streams.append(stream)
        return stream, next(iter(stream)).id

    yield start_one
    for stream in streams:
        stream.close()
