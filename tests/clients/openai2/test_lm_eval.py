"""lm-eval's local-completions: scoring (echo with log-probabilities) and generation, on a small task of our own."""

import json
import os
import subprocess
import sys

import pytest

from tests.clients.questions import MODEL
from tests.support.daemon import ROOT

CAPITALS = {"France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo"}
PROMPT = (
    "<|im_start|>user\nWhat is the capital of {{country}}?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
CHOICE = """
task: quire_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: {prompt}
doc_to_choice: choices
doc_to_target: 1
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
WRITE = """
task: quire_write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: {prompt}
doc_to_target: right
target_delimiter: ""
generation_kwargs: {{until: ["\\n"], max_gen_toks: 30, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def evaluate(request, base_url, tmp_path):
    data = tmp_path / "capitals.jsonl"
    rows = []
    for country, capital in CAPITALS.items():
        wrong, right = (f"The capital of {country} is {city}." for city in ("Banana", capital))
        rows.append(json.dumps({"country": country, "right": right, "choices": [wrong, right]}))
    data.write_text("\n".join(rows))
    for name, text in (("choice", CHOICE), ("write", WRITE)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=data, prompt=json.dumps(PROMPT)))
    tokenizer = request.config.getoption("model") or str(ROOT / "models/demo/checkpoint")

    def run(task: str) -> dict[str, float]:
        where = f"model={MODEL},base_url={base_url}/completions,tokenizer={tokenizer},num_concurrent=2,max_retries=1"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", where]
        command += ["--tasks", task, "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
        env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        (report,) = (tmp_path / "out").rglob("results_*.json")
        return json.loads(report.read_text())["results"][task]

    return run


# rule: Fields: `echo` acts, also with `logprobs`
def test_right_answers_score_higher_than_wrong_ones(evaluate):
    assert evaluate("quire_choice")["acc,none"] == 1


def test_answers_are_generated(evaluate):
    assert evaluate("quire_write")["exact_match,none"] == 1
