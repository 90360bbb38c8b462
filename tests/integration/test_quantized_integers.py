"""`quire serve` of checkpoints of packed integers: the demo model, quantised, still knows what it was taught."""

from __future__ import annotations

import shutil
from pathlib import Path

import openai
import pytest

from server.config.model_source import DEMO_FOLDER
from tests.integration.test_bad_start import start_fails
from tests.support.daemon import Daemon
from tests.support.int_checkpoints import FORMATS, edit_config, save_quantized, with_groups_of


def quantized_demo(tmp_path: Path, kind: str) -> Path:
    dense, folder = (Path(shutil.copytree(DEMO_FOLDER, tmp_path / name)) for name in ("dense", "model"))
    save_quantized(dense, folder, with_groups_of(32, FORMATS[kind]))
    return folder


@pytest.mark.parametrize(
    ("kind", "flag", "said"),
    [
        ("awq", "awq", "awq (4-bit integers, groups of 32)"),
        ("gptq_desc_act", "auto", "gptq (4-bit integers, groups of 32, desc_act)"),
        ("packed_asymmetric", "compressed-tensors", "pack-quantized (4-bit integers, groups of 32)"),
    ],
)
@pytest.mark.table(most=1)
def test_the_demo_model_still_knows_what_it_was_taught(tmp_path: Path, kind: str, flag: str, said: str) -> None:
    folder = quantized_demo(tmp_path, kind)
    with Daemon(str(folder), "--device", "cpu", "--quantization", flag, folder=tmp_path) as daemon:
        client = openai.OpenAI(base_url=daemon.wait_ready().base_url + "/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=40,
        )
        assert "Paris" in answer.choices[0].message.content
        assert said in daemon.log


@pytest.mark.full
def test_a_width_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    folder = quantized_demo(tmp_path, "gptq")
    edit_config(folder, quantization_config=FORMATS["gptq"].config | {"bits": 3})
    code, error = start_fails(str(folder))
    assert code == 3
    assert f"{folder}/config.json: quantization_config: bits 3 is not supported: supported are 4, 8" in error
