"""Take the pictures of the chat page, on the demo model: `python -m tests.browser.chat_screenshots docs/images`."""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.conftest import FLAGS, find_chromium
from tests.browser.screenshots import save
from tests.support.daemon import Daemon

EARLIER = ("Tell me a joke.", "What is continuous batching?", "What is the capital of Peru?")


def ask(page: Page, text: str, number: int) -> None:
    """Send a message and wait for the answer's figures."""
    page.fill("#input", text)
    page.press("#input", "Enter")
    expect(page.locator(".assistant .acts")).to_have_count(number)


def take(page: Page, path: Path) -> None:
    """Save a chat with thoughts, and a long answer while it grows."""
    for text in EARLIER:
        ask(page, text, 1)
        page.click("#new")
    page.click("#settings-button")
    page.fill("#temperature", "0")
    page.select_option("#reasoning_effort", "medium")
    page.keyboard.press("Escape")
    ask(page, "What is 17 plus 25?", 1)
    page.locator(".thinking summary").click()
    ask(page, "What is the KV cache?", 2)
    page.fill("#input", "Tell me a short story about a cat.")
    page.press("#input", "Enter")
    page.wait_for_function("() => [...document.querySelectorAll('.text')].at(-1).textContent.length > 90")
    page.mouse.move(640, 700)
    save(page, path)


def main() -> int:
    """Write chat-light.png and chat-dark.png into a folder."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as logs, sync_playwright() as playwright:
        flags = ["--device", "cpu", "--kv-cache-memory", "20MiB", "--max-model-len", "2048"]
        with Daemon(*flags, folder=Path(logs)) as daemon:
            url = daemon.wait_ready().base_url
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": 1200, "height": 810}, color_scheme=scheme)
                page.goto(url)
                expect(page.locator("#model")).to_have_value("quire-demo")
                take(page, folder / f"chat-{scheme}.png")
                page.close()
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
