"""The snippets of docs/how-to/clients.md work: those of this environment's packages, of Node and of the shell."""

import shutil

import pytest

from tests.clients.snippets import check_python, run_snippet, snippets
from tests.clients.test_node import FOLDER
from tests.clients.test_node import pytestmark as needs_node


# rule: Tools and reasoning: The clients of docs/how-to/clients.md work unchanged
@pytest.mark.parametrize("heading", ["OpenAI for Python", "LangChain", "pydantic-ai", "OpenAI Agents", "Anthropic"])
def test_python(daemon, tmp_path, heading):
    check_python(heading, url=daemon.base_url, cwd=tmp_path)


@needs_node
@pytest.mark.parametrize("heading", ["OpenAI for Node", "Vercel AI SDK", "Anthropic"])
def test_node(daemon, heading):
    (code,) = snippets(heading, "js")
    command = ["node", "--input-type=module"]
    assert "Paris" in run_snippet(command, code, url=daemon.base_url, cwd=FOLDER)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(daemon, tmp_path):
    (code,) = snippets("curl", "sh")
    printed = run_snippet(["sh", "-e"], code, url=daemon.base_url, cwd=tmp_path)
    assert "chat.completion" in printed
    assert printed.rstrip().endswith("data: [DONE]")
