"""Models whose products compute the norm before them and the activation behind give what separate ops give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.linear.ops import DenseLinear
from models.config.model_config import ModelConfig
from models.layers import moe as moe_layer
from tests.support.checkpoints import make_config
from tests.support.models_harness import PagedRunner, load
from tests.support.reference import save_checkpoint

KINDS = ("llama3.1", "llama_all_biases", "qwen3", "gemma2", "granite", "olmo2", "apertus", "qwen3_moe", "gpt_oss")
KINDS += ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite")
KINDS += ("kimi_linear", "lfm2", "lfm2_moe", "bamba", "granite_hybrid", "falcon_h1", "nemotron_h", "nemotron_3")
# All norms before a branch of the model are left to products, less the first, which adds nothing
WHOLE = ("llama3.1", "llama_all_biases", "qwen3", "gemma2", "granite", "apertus", "qwen3_moe", "gpt_oss", "qwen3_next")
WHOLE += ("qwen3_5", "qwen3_5_moe", "lfm2", "bamba", "granite_hybrid")


def _decode(folder: Path) -> torch.Tensor:
    """The logits of three decode steps behind a prompt."""
    runner = PagedRunner(load(folder), ModelConfig.from_folder(folder))
    index = runner.add_row()
    runner.step([(index, [5, 6, 7, 8, 9])])
    return torch.cat([runner.step([(index, [token])])[0] for token in (3, 4, 5)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_late_norms_and_gated_products_has_the_same_logits(kind, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, make_config(kind))
    expected = _decode(tmp_path)
    norms = []
    normed = DenseLinear.normed
    monkeypatch.setattr(DenseLinear, "takes_norm", lambda self, x, w: x.shape[0] == 1)
    monkeypatch.setattr(DenseLinear, "gates", lambda self, x, w: True)
    monkeypatch.setattr(DenseLinear, "normed", lambda *args, **options: norms.append(1) or normed(*args, **options))
    torch.testing.assert_close(_decode(tmp_path), expected, rtol=1e-5, atol=1e-5)
    if kind in WHOLE:
        num_layers = ModelConfig.from_folder(tmp_path).num_layers
        assert len(norms) == 3 * (2 * num_layers - 1)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "qwen2_moe", "mixtral", "granite_moe", "glm4_moe"])
def test_a_sum_over_experts_that_the_next_norm_computes_gives_the_same_logits(kind, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, make_config(kind))
    expected = _decode(tmp_path)
    monkeypatch.setattr(moe_layer, "sums_late", lambda x: True)
    monkeypatch.setattr(DenseLinear, "takes_norm", lambda self, x, w: x.shape[0] == 1)
    torch.testing.assert_close(_decode(tmp_path), expected, rtol=1e-5, atol=1e-5)
