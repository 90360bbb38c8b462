"""Record README's first picture: `python -m tests.browser.recording docs/images`; the chat and the KV page in one GIF.

Writes chat-and-kv-light.gif and chat-and-kv-dark.gif: a daemon with the demo model, a few readers in the background,
a chat of two questions. Needs Chromium, playwright and Pillow, which matplotlib brings along.
"""

import io
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.conftest import FLAGS, find_chromium
from tests.browser.screenshots import ask
from tests.support.daemon import Daemon

WIDTH, HEIGHT, GAP = 600, 640, 8
FRAME_MS, HOLD_MS, END_MS = 110, 1400, 2600
NUM_READERS = 3
NUM_COLOURS = 128
FIRST, SECOND = "What is the KV cache?", "Tell me a short story about a cat."


class Recording:
    """Frames of two pages side by side, each with the time for which it is shown."""

    def __init__(self, pages: list[Page], ground: str) -> None:
        self._pages = pages
        self._ground = ground
        self._frames: list[tuple[Image.Image, int]] = []

    def take(self, duration_ms: int = FRAME_MS) -> None:
        """Take a frame of both pages now."""
        frame = Image.new("RGB", (len(self._pages) * (WIDTH + GAP) - GAP, HEIGHT), self._ground)
        for place, page in enumerate(self._pages):
            shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            frame.paste(shot, (place * (WIDTH + GAP), 0))
        self._frames.append((frame, duration_ms))

    def take_until(self, is_over: Callable[[], bool], *, at_most: int) -> None:
        """Take frame after frame until something is so, and one more."""
        for _ in range(at_most):
            self.take()
            if is_over():
                break
        self.take()

    def save(self, path: Path) -> None:
        """Write them as one GIF that repeats, in the colours of every eighth part of it."""
        shown = [frame for frame, _ in self._frames[:: max(1, len(self._frames) // 8)]]
        stack = Image.new("RGB", (shown[0].width, HEIGHT * len(shown)))
        for place, frame in enumerate(shown):
            stack.paste(frame, (0, HEIGHT * place))
        palette = stack.quantize(NUM_COLOURS)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame, _ in self._frames]
        durations = [duration for _, duration in self._frames]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)


def record(browser: Browser, url: str, scheme: str, path: Path) -> None:
    """Record one chat in one theme."""
    settings = {"viewport": {"width": WIDTH, "height": HEIGHT}, "color_scheme": scheme}
    chat, cache = browser.new_page(**settings), browser.new_page(**settings)
    chat.goto(url)
    cache.goto(f"{url}/kv")
    expect(chat.locator("#model")).to_have_value("quire-demo")
    expect(cache.locator("#status-text")).to_contain_text("Live")
    recording = Recording([chat, cache], "#e2e3e5" if scheme == "light" else "#2a2f38")
    recording.take(HOLD_MS // 2)
    for number, text in enumerate((FIRST, SECOND), start=1):
        for end in range(4, len(text) + 4, 4):
            chat.fill("#input", text[:end])
            recording.take(FRAME_MS // 2)
        chat.press("#input", "Enter")
        acts = chat.locator(".assistant .acts")
        recording.take_until(lambda count=number, acts=acts: acts.count() == count, at_most=90)
        recording.take(HOLD_MS)
        if number == 1:
            _point_at_a_word(chat)
            recording.take(HOLD_MS)
            chat.mouse.move(2, 2)
    recording.take(END_MS)
    recording.save(path)
    chat.close()
    cache.close()


def _point_at_a_word(page: Page) -> None:
    """Move the pointer to a word in the middle of the answer, and wait for its probability."""
    box = page.locator(".assistant .text p").first.bounding_box()
    assert box is not None
    for step in range(20, 400, 12):
        page.mouse.move(box["x"] + step, box["y"] + 12)
        if step > 150 and page.locator("#word").is_visible():
            return


def main() -> int:
    """Write both recordings into a folder."""
    folder = Path(sys.argv[1])
    is_over = threading.Event()
    with tempfile.TemporaryDirectory() as logs, sync_playwright() as playwright:
        flags = ["--device", "cpu", "--kv-cache-memory", "32MiB", "--max-model-len", "2048"]
        with Daemon(*flags, folder=Path(logs)) as daemon:
            url = daemon.wait_ready().base_url
            for number in range(NUM_READERS):
                threading.Thread(target=ask, args=(url, number, is_over), daemon=True).start()
            time.sleep(3)
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            for scheme in ("light", "dark"):
                record(browser, url, scheme, folder / f"chat-and-kv-{scheme}.gif")
            is_over.set()
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
