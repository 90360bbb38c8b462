"""schemathesis: requests made from the OpenAPI document, right ones and wrong ones, and answers held against it."""

import subprocess
import sys

import pytest

from tests.clients.questions import MODEL

CONFIG = f"""
[parameters]
"path.model_id" = "{MODEL}"

# A schema cannot say all: contradicting fields, token ids outside the vocabulary, parts not served, are a 400;
# what takes longer than this test waits is a 408.
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "408"]
"""


# rule: Endpoints: The OpenAPI document names every answer, status and header, and is kept
@pytest.mark.parametrize("key", [None, "a-key-of-the-test"], ids=["open", "with-key"])
def test_every_answer_is_as_documented(start, tmp_path, key):
    flags = ["--max-model-len", "512", "--request-timeout", "3"]
    if key is not None:
        key_file = tmp_path / "keys"
        key_file.write_text(key)
        flags += ["--api-key-file", str(key_file)]
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(tmp_path / "schemathesis.toml"), "run"]
    command += ["--checks", "all", "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "40"]
    command += ["--continue-on-failure", "--no-color", "--seed", "1"]
    if key is not None:
        command += ["--header", f"Authorization: Bearer {key}"]
    with start(*flags) as daemon:
        url = daemon.wait_ready().base_url
        done = subprocess.run(
            [*command, f"{url}/openapi.json"], cwd=tmp_path, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
        assert daemon.get("/health").status_code == 200
