"""A daemon over the demo model whose device fails on demand (faulty_engine.py)."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import httpx

from server.config.model_source import DEMO_FOLDER
from tests.support.daemon import ROOT, Daemon, wait_for


class FaultyDaemon(Daemon):
    """A daemon over the demo model, whose next step with a prompt can be made to fail."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self.model = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
        command = (
            sys.executable,
            "-m",
            "tests.support.stub_daemon",
            str(self.model),
            "tests.support.faulty_engine",
        )
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        super().__init__(*arguments, folder=tmp_path, command=command, env={"PYTHONPATH": path})

    def fail_next(self, fault: str) -> None:
        """Let the next prompt meet a fault."""
        (self.model / "fault").write_text(fault)

    def post(self, max_tokens: int = 4) -> httpx.Response:
        """Send a chat request."""
        return httpx.post(self.base_url + "/v1/chat/completions", json=_body(max_tokens), timeout=60)

    def stream(self, max_tokens: int) -> tuple[list[dict], threading.Thread]:
        """Begin a streaming request; its events arrive in the list, an error's too."""
        events: list[dict] = []

        def read() -> None:
            body = {**_body(max_tokens), "stream": True}
            with httpx.stream("POST", self.base_url + "/v1/chat/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line.removeprefix("data: ")))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        wait_for(lambda: len(events) > 3, timeout_s=60, what="tokens")
        return events, thread


def _body(max_tokens: int) -> dict:
    return {
        "model": "stub",
        "messages": [{"role": "user", "content": "Go on"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
