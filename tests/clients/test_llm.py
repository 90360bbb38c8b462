"""Simon Willison's `llm`, as a command: the model is one entry of its extra-openai-models.yaml."""

import json
import os
import subprocess
import sys

import pytest

from tests.clients.questions import CAPITAL, FOLLOW_UP, MADRID, MODEL, PARIS, PERSON, REPORT, WEATHER, uses_report


@pytest.fixture
def llm(base_url, tmp_path):
    entry = f"- model_id: quire\n  model_name: {MODEL}\n  api_base: {base_url}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry + "  supports_tools: true\n  supports_schema: true\n")

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return lambda *more: run("-m", "quire", "-o", "temperature", "0", *more)


def test_chat_streamed_and_whole(llm):
    assert PARIS in llm(CAPITAL)
    assert llm(CAPITAL, "--no-stream") == llm(CAPITAL)


def test_multi_turn(llm):
    llm(CAPITAL)
    assert MADRID in llm("--continue", FOLLOW_UP)


def test_a_tool_is_called_and_its_result_used(llm):
    function = f'def get_weather(city: str) -> str:\n    """Get the weather of a city."""\n    return {REPORT!r}\n'
    assert uses_report(llm("--functions", function, WEATHER))


def test_structured_output(llm):
    answer = llm("--schema", "name, age int, city", PERSON)
    assert json.loads(answer) == {"name": "George", "age": 34, "city": "Madrid"}
