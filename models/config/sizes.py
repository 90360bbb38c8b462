"""How much smaller quantised layers make a model: known from its config, before any weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from models.config.matrices import quantized_matrices

if TYPE_CHECKING:
    from models.config.model_config import ModelConfig


def saved_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the whole model's quantised matrices take less than in `dtype`."""
    saved = 0
    for matrix, scheme in quantized_matrices(config):
        saved += matrix.out_features * matrix.in_features * dtype.itemsize
        saved -= scheme.matrix_bytes(matrix.out_features, matrix.in_features, itemsize=dtype.itemsize)
    return saved
