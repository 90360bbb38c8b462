"""Layers in C against their own forward: the same bits for each family that they take, and no other family taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from kernels.linear.onednn import pack
from models.build import build
from models.config.model_config import ModelConfig
from models.layers import layer_loop
from models.layers.layer_loop import LayerLoop
from models.weights.weights import Weights
from tests.support.checkpoints import TINY, make_config, make_configs
from tests.support.models_harness import CPU, SINGLE, PagedRunner
from tests.support.native_library import compiled_library
from tests.support.reference import save_checkpoint

BF16 = torch.bfloat16
PROMPTS = [list(range(3, 20)), [5], list(range(40, 71))]
TAKEN = (
    "llama2",
    "llama3.1",
    "llama_all_biases",
    "mistral",
    "qwen2",
    "qwen2_windows",
    "qwen3",
    "qwen3_yarn",
)
NOT_TAKEN = ("gemma2", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_next", "deepseek_v2", "glm4", "cohere2", "olmo2")
ROOMY = TINY | {"hidden_size": 64, "intermediate_size": 128}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    with compiled_library(with_products=True):
        yield


def reads_small_matrices() -> bool:
    """Return whether oneDNN packs matrices of 32 outputs in an order that C reads: not on every CPU."""
    return pack(torch.randn(TINY["hidden_size"], TINY["hidden_size"], dtype=BF16)).width is not None


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that C computed."""
    rows: list[int] = []
    run = layer_loop._Native.run

    def counted(self, hidden, ctx):
        rows.append(hidden.shape[0])
        return run(self, hidden, ctx)

    monkeypatch.setattr(layer_loop._Native, "run", counted)
    return rows


def build_model(folder: Path, quantization: str = "auto"):
    config = ModelConfig.from_folder(folder).quantized(quantization)
    return build(config, Weights.from_folder(folder, device=CPU, dtype=BF16), SINGLE), config


def decode(model, config) -> torch.Tensor:
    """Prompts in chunks, then rows of one token: all of them, some, one."""
    runner = PagedRunner(model, config, dtype=BF16)
    rows = [runner.add_row() for _ in PROMPTS]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        runner.step([(row, prompt)])
    logits = []
    for rows_of_step in (rows, rows[::-1], rows[:2], rows[1:2], rows):
        logits += runner.step([(row, [7 + row]) for row in rows_of_step])
    return torch.cat(logits)


def both(model, config, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits with the layers in C, where they are taken, and without."""
    found = decode(model, config)
    with monkeypatch.context() as patched:
        patched.setattr(LayerLoop, "_native_for", lambda self, caches: None)
        return found, decode(model, config)


@pytest.mark.parametrize("kind", list(make_configs()))
@pytest.mark.table(most=10)
def test_every_family_has_the_same_bits(
    kind: str, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, make_config(kind))
    found, expected = both(*build_model(tmp_path), monkeypatch)
    assert torch.equal(found, expected)
    # a prompt of one token is such a step, too
    assert kind not in TAKEN or not reads_small_matrices() or steps == [1, 3, 3, 2, 1, 3]
    assert kind not in NOT_TAKEN or steps == []


@pytest.mark.parametrize("kind", TAKEN)
def test_plain_layers_are_taken(kind: str, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_config(kind))
    found, expected = both(*build_model(tmp_path), monkeypatch)
    assert torch.equal(found, expected)
    assert not reads_small_matrices() or steps == [1, 3, 3, 2, 1, 3]


@pytest.mark.parametrize("quantization", ["none", "int4", "w8a8"])
@pytest.mark.parametrize("has_biases", [False, True])
def test_quantised_layers_are_taken(
    quantization: str, has_biases: bool, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(
        tmp_path,
        LlamaConfig(**ROOMY, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
        if has_biases
        else Qwen3Config(**ROOMY, num_key_value_heads=2, head_dim=32),
    )
    found, expected = both(*build_model(tmp_path, quantization), monkeypatch)
    assert torch.equal(found, expected)
    assert steps == [1, 3, 3, 2, 1, 3]


def test_another_pool_is_read_anew(tmp_path: Path, steps: list[int]) -> None:
    save_checkpoint(tmp_path, make_config("qwen3"))
    model, config = build_model(tmp_path)
    assert torch.equal(decode(model, config), decode(model, config))
    assert len(steps) == (12 if reads_small_matrices() else 0)


def test_many_rows_and_prompts_are_not_taken(tmp_path: Path, steps: list[int]) -> None:
    save_checkpoint(tmp_path, make_config("qwen3"))
    model, config = build_model(tmp_path)
    runner = PagedRunner(model, config, dtype=BF16)
    rows = [runner.add_row() for _ in range(40)]
    runner.step([(row, [3]) for row in rows])
    runner.step([(rows[0], [4]), (rows[1], [5, 6])])
    assert steps == []


def test_fp32_models_are_not_taken(tmp_path: Path, steps: list[int]) -> None:
    save_checkpoint(tmp_path, make_config("qwen3"))
    config = ModelConfig.from_folder(tmp_path)
    decode_fp32 = PagedRunner(
        build(config, Weights.from_folder(tmp_path, device=CPU, dtype=torch.float32), SINGLE), config
    )
    decode_fp32.step([(decode_fp32.add_row(), [3])])
    assert steps == []
