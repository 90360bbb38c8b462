"""How the tests run `quire batch`: its files, its command, a server that echoes."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.daemon import ROOT
from tests.support.scripted_server import Reply

TIMEOUT_S = 120


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "server", "batch", *map(str, arguments)]


def batch(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run `quire batch` to its end."""
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, **options)


def write_input(path: Path, count: int, **body) -> Path:
    lines = [request(f"r{i}", prompt=f"{i}", **body) for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def request(custom_id: str, *, url: str = "/v1/completions", **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def echo(path: str, body: dict | None) -> Reply:
    if body is None:
        return Reply(404)
    return Reply(body={"echo": body["prompt"]}, headers=(("x-request-id", f"id-{body['prompt']}"),))
