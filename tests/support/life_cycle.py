"""A running daemon's streams, readiness and end, as tests of its life watch them."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from tests.support.daemon import Daemon, is_alive, wait_for

MODEL = "quire-demo"
Start = Callable[..., Daemon]


class Stream:
    """A streaming chat request read in a thread: what came, event by event, and how the connection ended."""

    def __init__(self, daemon: Daemon, max_tokens: int) -> None:
        self.events: list[str] = []
        self.is_closed_well: bool | None = None
        self.error = ""
        self._url = daemon.base_url + "/v1/chat/completions"
        self._body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Go on"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
            self.is_closed_well = True
        except httpx.HTTPError as error:
            self.is_closed_well, self.error = False, repr(error)

    def wait_started(self) -> "Stream":
        """Wait until tokens flow."""
        wait_for(lambda: len(self.events) > 3, timeout_s=60, what="tokens")
        return self

    def wait_end(self, timeout_s: float = 60) -> list[dict]:
        """Wait for the end; return the events, decoded, without the [DONE] that must be the last."""
        self.thread.join(timeout_s)
        assert self.is_closed_well is True, self.error or f"no end in {timeout_s} s, events={len(self.events)}"
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


@contextmanager
def ends_within(daemon: Daemon, timeout_s: float, exit_code: int) -> Iterator[None]:
    """Check that the daemon ends in time, with the code, and that no child is left."""
    children = daemon.children()
    assert len(children) >= 2
    yield
    assert daemon.process.wait(timeout_s) == exit_code, daemon.log
    wait_for(lambda: not any(is_alive(pid) for pid in children), timeout_s=60, what="children ended")
    assert "Traceback" not in daemon.log


def ready_status(daemon: Daemon) -> int:
    try:
        return daemon.get("/ready").status_code
    except httpx.TransportError:
        return 0


def post(daemon: Daemon, **more: object) -> httpx.Response:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "ignore_eos": True, **more}
    return httpx.post(daemon.base_url + "/v1/chat/completions", json=body, timeout=60)
