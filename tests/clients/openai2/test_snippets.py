"""The snippets of docs/how-to/clients.md work: those of the packages that want openai 2."""

import pytest

from tests.clients.snippets import check_python


@pytest.mark.parametrize("heading", ["LiteLLM", "instructor", "LlamaIndex"])
def test_python(daemon, tmp_path, heading):
    check_python(heading, url=daemon.base_url, cwd=tmp_path)
