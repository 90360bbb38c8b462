"""The least times of runs: what steps read, what prompts compute, by the card that ran them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.floors import CARDS, H100, H200, SHAPES, StepCosts, floor_s, floors, workload_lens
from models.config.model_config import ModelConfig

RESULTS = Path("benchmarks/results")


def costs(shape: str, quantization: str = "auto", kv_dtype: torch.dtype = torch.bfloat16) -> StepCosts:
    return StepCosts(ModelConfig.from_folder(SHAPES / shape).quantized(quantization), kv_dtype)


@pytest.mark.parametrize(
    ("shape", "gb"),
    [
        ("qwen3-30b-a3b", 6.1),
        ("qwen3-30b-a3b-fp8", 3.4),
        ("llama-3.1-8b-fp8-blocks", 8.0),
        ("deepseek-v3-8-layers-fp8", 6.7),
    ],
)
def test_a_token_reads_its_experts_and_no_embedding(shape: str, gb: float) -> None:
    """The floors of docs/explanation/performance.md, at 3.01 TB/s: 2.02, 1.12 and 2.67 ms."""
    assert costs(shape).weight_bytes(1) / 1e9 == pytest.approx(gb, rel=0.02)


def test_rows_read_the_different_experts_that_they_choose_by_chance() -> None:
    model, one = costs("qwen3-30b-a3b"), costs("qwen3-30b-a3b").weight_bytes(1)
    expert = 48 * 3 * 2048 * 768 * 2  # one of 128 in each layer
    assert model.weight_bytes(2) - one == pytest.approx(expert * 8 * (1 - 8 / 128))
    whole = ModelConfig.from_folder(SHAPES / "qwen3-30b-a3b").weight_bytes(torch.bfloat16)
    assert model.weight_bytes(10_000) == pytest.approx(whole - 2 * 151936 * 2048)
    assert costs("llama-3.1-8b").weight_bytes(1) == costs("llama-3.1-8b").weight_bytes(64)


def test_a_row_reads_its_keys_and_values_within_windows_and_moves_its_state() -> None:
    assert costs("llama-3.1-8b").row_bytes(1000) == 1000 * 32 * 2 * 8 * 128 * 2
    assert costs("llama-3.1-8b", kv_dtype=torch.float8_e4m3fn).row_bytes(1000) == 1000 * 32 * 2 * 8 * 128
    full, window = 12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2 * 128  # bytes of a token; of all that windows keep
    assert costs("gpt-oss-20b").row_bytes(1000) == 1000 * full + window
    assert costs("deepseek-v2-lite").row_bytes(1000) == 1000 * 27 * 576 * 2
    hybrid = ModelConfig.from_folder(SHAPES / "qwen3.5-35b-a3b")
    assert costs("qwen3.5-35b-a3b").row_bytes(1) == 2 * hybrid.state_bytes + hybrid.kv_bytes_per_token(
        1, torch.bfloat16
    )


def test_prompts_compute_their_products_and_causal_attention() -> None:
    layers, head = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336), 128256 * 4096
    attention = 32 * 2 * 32 * (128 + 128) * 1000 * 1001 // 2
    flops = 2 * 1000 * layers + 2 * head + attention
    assert costs("llama-3.1-8b").prompt_s([1000], H100) == pytest.approx(flops / 798e12, rel=1e-3)  # norms count, too
    assert costs("llama-3.1-8b").prompt_s([1000] * 3, H100) == pytest.approx(3 * flops / 798e12, rel=1e-3)


def test_tokens_behind_others_attend_to_them_within_windows() -> None:
    for shape in ("llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite"):
        model = costs(shape)
        assert model.attention_flops(100, behind=900) == model.attention_flops(1000) - model.attention_flops(900)
    assert costs("llama-3.1-8b").attention_flops(1, behind=999) == 32 * 2 * 32 * 256 * 1000


def test_products_of_rounded_activations_are_twice_as_fast_and_those_of_weights_alone_are_not() -> None:
    plain, head = costs("llama-3.1-8b").prompt_s([4096], H100), 2 * 128256 * 4096 / 798e12
    attention = 32 * 2 * 32 * 256 * 4096 * 4097 // 2 / 798e12
    halved = head + attention + (plain - head - attention) / 2
    for shape in ("llama-3.1-8b-fp8-blocks", "llama-3.1-8b-w8a8"):
        assert costs(shape).prompt_s([4096], H100) == pytest.approx(halved, rel=1e-3)
    assert costs("llama-3.1-8b", "fp8").prompt_s([4096], H100) == pytest.approx(halved, rel=1e-3)
    assert costs("llama-3.1-8b-nvfp4").prompt_s([4096], H100) == pytest.approx(plain, rel=1e-3)
    ratio = costs("qwen3-30b-a3b-fp8").prompt_s([1], H100) / costs("qwen3-30b-a3b").prompt_s([1], H100)
    assert 0.5 < ratio < 0.6  # the head has 16 bits


def test_requests_that_begin_together_share_steps_until_each_ends() -> None:
    model = costs("llama-3.1-8b")
    prompt = model.weight_bytes(30) / H100.bytes_per_s  # 30 tokens compute in less time than the weights are read
    step = model.weight_bytes(1) / H100.bytes_per_s
    read = (model.row_bytes(11) + model.row_bytes(21) + model.row_bytes(22)) / H100.bytes_per_s
    found = floor_s(model, [(10, 2), (20, 3)], H100)
    assert found == pytest.approx(prompt + 2 * step + read)
    assert floor_s(model, [(10, 2), (20, 3)], H100, num_gpus=2) == pytest.approx(found / 2)
    assert floor_s(model, [(10, 2), (20, 3)], H200) == pytest.approx(found * 3.01 / 4.31)


def test_workloads_have_the_lengths_of_their_reports() -> None:
    report = json.loads(max(RESULTS.glob("offline-llama-3.1-8b-nvfp4-h100-????-??-??.json")).read_text())
    for name, result in report["workloads"].items():
        num_input, num_output = map(sum, zip(*workload_lens(name), strict=True))
        assert (num_input, num_output) == (result["num_input_tokens"], result["num_output_tokens"])


def test_a_report_has_the_floor_of_its_own_card_and_flags() -> None:
    report = json.loads(max(RESULTS.glob("offline-qwen3-30b-a3b-nf4-h100-????-??-??.json")).read_text())
    assert (report["args"]["shape"], report["args"]["quantization"]) == ("qwen3-30b-a3b", "bitsandbytes-nf4")
    nf4 = costs("qwen3-30b-a3b", "bitsandbytes-nf4")
    assert floors(report)["single"] == floor_s(nf4, workload_lens("single"), H100)
    report["versions"]["gpu"] = "NVIDIA H200"
    assert floors(report)["single"] == floor_s(nf4, workload_lens("single"), H200)
    report["workloads"] = {"mixed256": {}, "batch8": {}}
    assert list(floors(report)) == ["batch8"]


def test_cards_read_the_same_share_of_what_they_should() -> None:
    h100, h200 = CARDS.values()
    assert h200.bytes_per_s == pytest.approx(h100.bytes_per_s / 3.35 * 4.8, rel=1e-3)
