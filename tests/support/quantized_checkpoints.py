"""Checkpoints made of others by storing their projections another way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.build import build, check_headers
from models.config.model_config import ModelConfig
from models.parallel import TensorParallel
from models.weights.weights import Weights
from tests.support.models_harness import CPU, SINGLE, PagedRunner

PROMPT = [3, 30, 17, 4, 25, 8, 8, 31]


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors with `change` applied to its dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load_model(
    folder: Path, quantization: str = "auto", *, dtype: torch.dtype = torch.float32, tp: TensorParallel = SINGLE
) -> torch.nn.Module:
    """Build our model from the folder, as the flag --quantization says."""
    config = ModelConfig.from_folder(folder).quantized(quantization)
    with torch.inference_mode():
        model = build(config, Weights.from_folder(folder, device=CPU, dtype=dtype), tp)
    check_headers(config, folder, tp, dtype=dtype)  # what can be loaded passes this check, too
    return model


def logits_of(
    folder: Path, quantization: str = "auto", *, dtype: torch.dtype = torch.float32, prompt: list[int] = PROMPT
) -> torch.Tensor:
    """[len(prompt), vocab_size]."""
    runner = PagedRunner(load_model(folder, quantization, dtype=dtype), ModelConfig.from_folder(folder), dtype=dtype)
    return runner.step([(runner.add_row(), prompt)])[0].float()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole tensor, by its norm."""
    return float((found - expected).norm() / expected.norm())
