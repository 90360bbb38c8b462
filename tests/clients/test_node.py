"""The clients on Node: each of node/*.test.mjs under node's own test runner, and compatcanary's scan."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.questions import MODEL

FOLDER = Path(__file__).parent / "node"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules").exists(), reason="needs node and npm's packages"
)


def node(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "QUIRE_URL": url}
    return subprocess.run(["node", *arguments], cwd=FOLDER, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.test.mjs")))
def test_node(daemon, name):
    done = node("--test", "--test-reporter=spec", name, url=daemon.base_url)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]


def test_compatcanary_finds_no_fault(daemon, tmp_path):
    report = tmp_path / "report.json"
    scan = ["scan", "--base-url", f"{daemon.base_url}/v1", "--model", MODEL, "--api-key", "none", "--fail-on", "never"]
    done = node("node_modules/.bin/compatcanary", *scan, "--format", "json", "--output", str(report), url="")
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["score"] == 100, json.dumps(found, indent=1)
