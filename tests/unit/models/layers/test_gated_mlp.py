"""Which layers hand gate and up to one kernel, and where that is expected to pay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.linear import dense
from models.build import build
from models.config.model_config import ModelConfig
from models.layers import linear
from models.weights.weights import Weights
from tests.support.checkpoints import make_configs
from tests.support.models_harness import CPU, SINGLE, PagedRunner
from tests.support.reference import save_checkpoint

PROMPT = list(range(3, 20))
NUM_SMS = 132


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """is_gelu of each call that one kernel would compute; the specification does."""
    seen: list[bool] = []

    def gated_linear(x: torch.Tensor, w: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
        seen.append(is_gelu)
        return dense.gated_linear(x, w, is_gelu=is_gelu)

    monkeypatch.setattr(linear, "gated_linear", gated_linear)
    return seen


def _logits(kind: str, folder: Path) -> torch.Tensor:
    config = make_configs()[kind]
    if not (folder / "config.json").exists():
        save_checkpoint(folder, config)
    model_config = ModelConfig.from_folder(folder)
    model = build(model_config, Weights.from_folder(folder, device=CPU, dtype=torch.float32), SINGLE)
    runner = PagedRunner(model, model_config)
    runner.add_row()
    return torch.stack(runner.step([(0, PROMPT)]))


@pytest.mark.parametrize(("kind", "is_gelu"), [("qwen3", False), ("gemma2", True)])
def test_a_plain_mlp_gives_gate_and_up_to_one_kernel(kind, is_gelu, gates, tmp_path, monkeypatch):
    found = _logits(kind, tmp_path)
    assert gates
    assert set(gates) == {is_gelu}
    monkeypatch.setattr(linear, "gated_linear", lambda x, w, *, is_gelu: None)
    torch.testing.assert_close(found, _logits(kind, tmp_path))


@pytest.mark.parametrize("kind", ["llama_all_biases", "falcon_h1"])
def test_biases_and_factors_of_the_gate_do_not(kind, gates, tmp_path):
    _logits(kind, tmp_path)
    assert not gates


def test_one_kernel_pays_for_many_rows_of_shapes_that_fill_the_device():
    def pays(num_rows: int, size: int, k: int) -> bool:
        return dense.pays(num_rows=num_rows, n=2 * size, k=k, num_sms=NUM_SMS)

    assert pays(8192, 14336, 4096)
    assert pays(8192, 3072, 1024)
    assert not pays(512, 14336, 4096)  # of a batch that decodes
    assert not pays(1024, 768, 2048)  # 36 tiles for 132 multiprocessors
    assert not pays(2 * 192, 66 * 128, 64)  # tiles fill the device exactly, but rows are few


def test_the_share_of_filled_tiles():
    assert dense.fill(num_rows=2 * 192, n=66 * 256, num_sms=NUM_SMS) == 1.0
    assert dense.fill(num_rows=2 * 192 + 1, n=66 * 256, num_sms=NUM_SMS) == pytest.approx(385 / 768)
