"""The gated feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from kernels.ops import silu_and_mul
from models.config import ModelConfig
from models.layers.linear import MergedColumnLinear, RowLinear
from models.parallel import TensorParallel
from models.quantization.base import LinearMethod
from models.weights import Weights


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the intermediate dimension split over ranks."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel, method: LinearMethod) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnLinear(
            w,
            ("gate_proj", "up_proj"),
            in_features=config.hidden_size,
            out_features=config.intermediate_size,
            has_bias=config.has_mlp_bias,
            method=method,
            tp=tp,
        )
        self.down_proj = RowLinear(
            w,
            "down_proj",
            in_features=config.intermediate_size,
            out_features=config.hidden_size,
            has_bias=config.has_mlp_bias,
            method=method,
            tp=tp,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [T, hidden_size] → [T, hidden_size]."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
