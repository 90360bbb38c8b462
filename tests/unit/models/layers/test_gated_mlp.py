"""Which layers hand gate and up to one kernel, and where that is expected to pay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.linear import dense, late_norm
from kernels.linear.ops import DenseLinear
from models.build import build
from models.config.model_config import ModelConfig
from models.weights.weights import Weights
from tests.support.checkpoints import make_config
from tests.support.models_harness import CPU, SINGLE, PagedRunner
from tests.support.reference import save_checkpoint

PROMPT = list(range(3, 20))
NUM_SMS = 132


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """is_gelu of each call that one kernel would compute; the specification does."""
    seen: list[bool] = []

    def gated(self: DenseLinear, x: torch.Tensor, w: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
        seen.append(is_gelu)
        return late_norm.gated_linear(x, w, is_gelu=is_gelu)

    monkeypatch.setattr(DenseLinear, "gates", lambda self, x, w: True)
    monkeypatch.setattr(DenseLinear, "gated", gated)
    return seen


def _logits(kind: str, folder: Path) -> torch.Tensor:
    config = make_config(kind)
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
    monkeypatch.setattr(DenseLinear, "gates", lambda self, x, w: False)
    torch.testing.assert_close(found, _logits(kind, tmp_path))


@pytest.mark.parametrize("kind", ["llama_all_biases", "falcon_h1"])
def test_biases_and_factors_of_the_gate_do_not(kind, gates, tmp_path):
    _logits(kind, tmp_path)
    assert not gates


def _pays(num_rows: int, size: int, k: int) -> bool:
    return dense.pays(num_rows=num_rows, n=2 * size, k=k, num_sms=NUM_SMS)


@pytest.mark.parametrize(
    ("size", "k", "wins", "losses"),
    [
        (3072, 1024, (2048, 4096, 8192), (1024,)),
        (6144, 2048, (2048, 4096, 8192), (1024,)),
        (14336, 4096, (1536, 2048, 3072, 4096, 6144, 8192), (1024,)),
        (7168, 4096, (8192,), ()),
        (3584, 4096, (8192,), ()),
        (14336, 3584, (8192,), ()),
        (18944, 3584, (2048, 8192), ()),
        (25600, 5120, (2048, 8192), ()),
    ],
)
def test_one_kernel_pays_where_it_was_measured_to(size, k, wins, losses):
    """On one H100, 2026-11-27: results/kernels-gated-products-h100-2026-11-27.json."""
    assert [num_rows for num_rows in (*losses, *wins) if _pays(num_rows, size, k)] == list(wins)


def test_where_nothing_was_measured_one_kernel_is_not_expected_to_pay():
    assert not _pays(512, 14336, 4096)  # of a batch that decodes
    assert not _pays(66 * 192, 128 * 2, 1024)  # tiles fill the device once
    assert _pays(2 * 66 * 192, 128 * 2, 1024)
    assert not _pays(1600, 14336, 4096)  # nine tiles of rows, of which one has 64
    assert _pays(1728, 14336, 4096)  # the same, all whole
    assert not _pays(1600, 3072, 64)  # so few inputs count as 1,024, with which a fill of 0.76 is too low


def test_the_share_of_filled_tiles():
    assert dense.fill(num_rows=2 * 192, n=66 * 256, num_sms=NUM_SMS) == 1.0
    assert dense.fill(num_rows=2 * 192 + 1, n=66 * 256, num_sms=NUM_SMS) == pytest.approx(385 / 768)
