"""schemathesis: requests made from the OpenAPI document, right ones and wrong ones, and answers held against it.

All checks are on, at their defaults. hooks.py names the refusals that a schema cannot describe. The context is short,
so that answers are, and hidden states are pooled, so that the demo model makes embeddings as well.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import ROOT, Daemon

MODEL = "quire-demo"
CONFIG = f"""
hooks = "{Path(__file__).with_name("hooks.py")}"

[parameters]
"path.model_id" = "{MODEL}"
"""


# rule: Endpoints: The OpenAPI document names every answer, status and header, and is kept
@pytest.mark.parametrize("key", [None, "a-key-of-the-test"], ids=["open", "with-key"])
def test_every_answer_is_as_documented(request, tmp_path, key):
    flags = ["--device", "cpu", "--served-model-name", MODEL, "--pooling", "last"]
    flags += ["--max-model-len", "96", "--request-timeout", "2"]
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(tmp_path / "schemathesis.toml"), "run"]
    command += ["--checks", "all", "--phases", "examples,coverage,fuzzing,stateful"]
    command += ["--max-examples", request.config.getoption("--examples"), "--continue-on-failure", "--no-color"]
    command += ["--seed", "1"]
    if key is not None:
        key_file = tmp_path / "keys"
        key_file.write_text(key)
        flags += ["--api-key-file", str(key_file)]
        command += ["--header", f"Authorization: Bearer {key}"]
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    server = (request.config.getoption("--server-python"), "-m", "server")
    with Daemon(*flags, folder=tmp_path, command=server, env={"PYTHONPATH": str(ROOT)}) as daemon:
        url = daemon.wait_ready().base_url
        done = subprocess.run(
            [*command, f"{url}/openapi.json"], cwd=tmp_path, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
        assert daemon.get("/health").status_code == 200
