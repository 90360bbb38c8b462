"""The snippets of docs/how-to/clients.md, run as they stand but for the address."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.daemon import ROOT

_BLOCK = re.compile(r"^## (?P<heading>[^\n]+)$|^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_ADDRESS = "http://127.0.0.1:8000"


def snippets(heading: str, language: str) -> list[str]:
    """Return the blocks of one language under one heading."""
    found, current = [], ""
    for match in _BLOCK.finditer((ROOT / "docs" / "how-to" / "clients.md").read_text(encoding="utf-8")):
        current = match["heading"] or current
        if current == heading and match["language"] == language:
            found.append(match["code"])
    assert found, (heading, language)
    return found


def run_snippet(command: list[str], code: str, *, url: str, cwd: Path) -> str:
    """Run code given to a command's standard input; return what it printed."""
    env = {**os.environ, "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command, input=code.replace(_ADDRESS, url), cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_python(heading: str, *, url: str, cwd: Path) -> None:
    """Run the Python snippets under a heading: each asks for a capital or a person."""
    for code in snippets(heading, "python"):
        printed = run_snippet([sys.executable, "-"], code, url=url, cwd=cwd)
        assert "Paris" in printed or "George" in printed
