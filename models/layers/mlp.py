"""GatedMLP: the gated feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from kernels.ops import gelu_tanh_and_mul, silu_and_mul
from models.config.model_config import ModelConfig
from models.layers.linear import ColumnLinear, RowLinear, column_part, row_part
from models.parallel import LayerOutput, TensorParallel
from models.quantization.linear_method import LinearMethod
from models.weights.weights import Weights

_ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), the intermediate dimension split over ranks.

    intermediate_size: default is the config's. is_partial: the caller sums over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        method: LinearMethod,
        *,
        intermediate_size: int | None = None,
        is_partial: bool = False,
    ) -> None:
        super().__init__()
        intermediate_size = intermediate_size or config.intermediate_size
        self.activate_and_mul = _ACTIVATIONS[config.activation]
        parts = [
            column_part(name, out_features=intermediate_size, in_features=config.hidden_size, tp=tp)
            for name in ("gate_proj", "up_proj")
        ]
        self.gate_up_proj = ColumnLinear(w, parts, has_bias=config.has_mlp_bias, method=method)
        part = row_part("down_proj", out_features=config.hidden_size, in_features=intermediate_size, tp=tp)
        self.down_proj = RowLinear(w, part, has_bias=config.has_mlp_bias, method=method, tp=tp, is_partial=is_partial)

    def forward(self, hidden: torch.Tensor) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]."""
        return self.down_proj(self.activate_and_mul(self.gate_up_proj(hidden)))
