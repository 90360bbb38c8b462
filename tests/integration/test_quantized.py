"""`quire serve --quantization`: the daemon answers from quantised weights, says so, and refuses what contradicts."""

import json
import shutil
from pathlib import Path

import openai
import pytest

from server.config.model_source import DEMO_FOLDER
from tests.integration.test_bad_start import start_fails
from tests.support.daemon import Daemon

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8", "fp8 (e4m3; scales: weights by row, activations by token), quantized on load"),
        ("bitsandbytes-nf4", "bitsandbytes nf4 (4 bits, scales by 64 inputs), quantized on load"),
        ("bitsandbytes-int8", "bitsandbytes int8 (weights, scales by row), quantized on load"),
        ("int4", "int4 (4-bit integers, groups of 32), quantized on load"),
    ],
)
@pytest.mark.table(most=1)
def test_the_demo_model_still_knows_what_it_was_taught(tmp_path: Path, name: str, said: str) -> None:
    with Daemon("--device", "cpu", "--quantization", name, folder=tmp_path) as daemon:
        client = openai.OpenAI(base_url=daemon.wait_ready().base_url + "/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="quire-demo",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=40,
        )
        assert "Paris" in answer.choices[0].message.content
        assert said in daemon.log


@pytest.mark.full
def test_a_flag_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": NF4}))
    code, error = start_fails(str(folder), "--quantization", "fp8")
    assert code == 3
    assert "--quantization fp8: the checkpoint is quantized as bitsandbytes-nf4 already: leave the flag out" in error


@pytest.mark.full
def test_a_checkpoint_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": NF4}))
    code, error = start_fails(str(folder))
    assert code == 3
    assert f"{folder}: tensor model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4 is missing" in error
