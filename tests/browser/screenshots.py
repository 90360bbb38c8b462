"""Take the pictures of /kv: `python -m tests.browser.screenshots docs/images`, with a daemon and a dozen readers.

Needs Chromium, playwright and Pillow, which matplotlib brings along.
"""

import io
import sys
import tempfile
import threading
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import FLAGS, find_chromium
from tests.support.daemon import Daemon

LIBRARY = "You are the librarian of a small town, patient and precise. " * 9
QUESTIONS = ("Which books are about bees?", "Tell me a story.", "Where is the map of the harbour?", "Who was Aldus?")
WATCH_S = 40


def ask(url: str, number: int, is_over: threading.Event) -> None:
    """Chat again and again, with prompts of several lengths; two in three begin alike."""
    turn = number
    while not is_over.is_set():
        turn += 1
        system = LIBRARY if number % 3 else f"You are reader {number}. " * 4
        user = f"{QUESTIONS[turn % len(QUESTIONS)]} " * (1 + 5 * turn % 17)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = {"model": "quire-demo", "messages": messages, "max_tokens": 60 + 70 * (turn % 7), "ignore_eos": True}
        try:
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        except httpx.HTTPError:
            return


def take(page: Page, path: Path) -> None:
    """Save what is in sight, once somebody's blocks are highlighted nowhere and the pointer is away."""
    page.wait_for_selector("#main:not([hidden])")
    page.wait_for_timeout(WATCH_S * 1000)
    save(page, path)


def save(page: Page, path: Path) -> None:
    """Save what is in sight as a PNG of 256 colours, which has a third of the size."""
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> int:
    """Write kv-light.png and kv-dark.png into a folder."""
    folder = Path(sys.argv[1])
    is_over = threading.Event()
    with tempfile.TemporaryDirectory() as logs, sync_playwright() as playwright:
        flags = ["--device", "cpu", "--kv-cache-memory", "72MiB"]
        with Daemon(*flags, folder=Path(logs)) as daemon:
            url = daemon.wait_ready().base_url
            for number in range(14):
                threading.Thread(target=ask, args=(url, number, is_over), daemon=True).start()
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": 1200, "height": 1000}, color_scheme=scheme)
                page.goto(f"{url}/kv")
                take(page, folder / f"kv-{scheme}.png")
                page.close()
            is_over.set()
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
