"""The benchmark of quantisation: every scheme of its table is one that a model has, and failures are told apart."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.demo_model.corpus.base import Question
from benchmarks.demo_model.quantization import (
    fitted,
    format_trained,
    measure_scheme,
    measure_trained,
)
from benchmarks.quantization import SCHEMES, format_report, main, measure_errors
from benchmarks.quantization_reference import Conversation, Reference
from benchmarks.quantization_schemes import Candidate
from engine.interface.config import EngineConfig
from models.config.model_config import ModelConfig
from models.errors import ModelError
from server.config.model_source import DEMO_FOLDER

PROMPTS = ([5, 9, 300, 41, 7], [8, 1000, 12, 77, 500, 6, 3])
GATE_UP = "layers.1.mlp.gate_up_proj"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The demo model's first two layers, and what they make of some tokens."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(DEMO_FOLDER, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"num_hidden_layers": 2, "layer_types": raw["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    later = tuple(f"model.layers.{index}." for index in range(2, 6))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(later)}
    save_file(kept, folder / "model.safetensors")
    asked = [Conversation(list(prompt), len(prompt) - 3) for prompt in PROMPTS]
    others = [*asked, Conversation([900, 4, 31, 600, 2, 19], 6)]
    return Reference.of(folder, asked, others, device=torch.device("cpu"))


@pytest.mark.parametrize(("name", "candidate"), SCHEMES.items())
def test_every_scheme_errs_as_its_bits_let_expect(tmp_path, name, candidate):
    raw = json.loads((DEMO_FOLDER / "config.json").read_text()) | {"hidden_size": 256, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": candidate.section}))
    config = EngineConfig(model=str(tmp_path), device="cpu", quantization=candidate.flag)
    errors = measure_errors(config)
    assert sorted(errors) == ["mlp.down_proj", "mlp.gate_proj", "self_attn.o_proj", "self_attn.q_proj"]
    assert all(error == 0.0 if name == "bf16" else 0.001 < error < 0.25 for error in errors.values())


def test_a_scheme_that_failed_leaves_the_others_their_rows():
    result = {"weights_gib": 1.5, "errors": {"a": 0.01, "b": 0.02}, "decode_tok_per_s": {"1": 1234.5}}
    report = {"args": {"batches": [1]}, "schemes": {"fp8": result, "nf4": {"failed": "RuntimeError: no"}}}
    assert format_report(report).splitlines()[1:] == ["fp8       1.50  2.00%      1,234", "nf4     failed"]


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_compared_on_trained_weights(reference, name):
    found = measure_scheme(SCHEMES[name], reference)
    assert sorted(found["errors"]) == ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"]
    if name == "bf16":
        assert set(found["errors"].values()) | {found["logits_error"], found["kl"]} == {0.0}
        assert (found["same_tokens"], found["same_answers"]) == (1.0, 2)
        return
    keeps_activations = "8" in name and name != "w8a8" and not name.startswith("fp8")
    low, high = (0.001, 0.02) if keeps_activations else (0.002, 0.15)
    assert all(low < error < high for error in found["errors"].values())
    assert low < found["logits_error"] < 2 * high
    assert 0.0 < found["kl"] < 0.2
    assert 0.0 <= found["same_tokens"] <= 1.0


def test_answers_are_compared_from_the_prompts_last_token_to_the_end(reference):
    assert [len(logits) for logits in reference.logits] == [4, 4]


def test_static_scales_reach_the_largest_inputs_that_were_seen(reference):
    of_gate = reference.amax_of("model.layers.1.mlp.gate_proj")
    assert of_gate == reference.amax_of("model.layers.1.mlp.up_proj") == reference.input_amax[GATE_UP]
    assert of_gate != reference.amax_of("model.layers.1.mlp.down_proj")
    with pytest.raises(ModelError, match="router"):
        reference.amax_of("model.layers.7.mlp.router")


def test_groups_become_the_largest_that_divide_every_layer():
    model = ModelConfig.from_folder(DEMO_FOLDER)
    assert fitted(SCHEMES["awq"], model).section["group_size"] == 64
    assert SCHEMES["awq"].section["group_size"] == 128
    assert fitted(SCHEMES["awq"], replace(model, hidden_size=256)).section["group_size"] == 128
    for name in ("bf16", "fp8", "fp8-blocks", "packed-32", "packed-8bit"):
        assert fitted(SCHEMES[name], model) == SCHEMES[name]


def test_the_demo_answers_and_a_scheme_that_cannot_be_leaves_the_others_their_rows(monkeypatch):
    monkeypatch.setitem(SCHEMES, "odd", Candidate("bitsandbytes-nf3"))
    questions = [
        Question("any", [{"role": "user", "content": text}], is_right=lambda reply: True)
        for text in ("What is the capital of France?", "What is 3 + 4?", "Hello!")
    ]
    report = measure_trained(
        ["odd", "int8"], DEMO_FOLDER, questions[:2], calibrating=questions[2:], device="cpu", max_tokens=4
    )
    assert report["answers"] == 2
    assert 4 <= report["tokens"] <= 10
    assert "nf3" in report["schemes"]["odd"]["failed"]
    assert report["schemes"]["int8"]["same_tokens"] > 0.5
    odd, int8 = format_trained(report).splitlines()[1:]
    assert odd.split()[:2] == ["odd", "failed:"]
    assert int8.endswith("of 2")


@pytest.mark.parametrize("answers", ["0", "151", "-3"])
def test_a_number_of_answers_that_the_corpus_does_not_have_is_refused(monkeypatch, capsys, answers):
    monkeypatch.setattr("sys.argv", ["quantization", "--trained", "--answers", answers])
    with pytest.raises(SystemExit):
        main()
    assert f"--answers must be 1 to 150, found {answers}" in capsys.readouterr().err
