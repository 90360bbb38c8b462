"""ShortConv: a gated causal convolution over the last tokens in place of attention (Liquid AI, LFM2).

A layer keeps the convolution's last inputs of each request (LayerState), its channels split over ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows
from kernels.ops import causal_conv
from kernels.states import StateMetadata, StateView
from models.config.lfm2 import ShortConvConfig
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.linear import ColumnLinear, RowLinear, column_part, row_part
from models.parallel import LayerOutput, TensorParallel
from models.quantization.linear_method import LinearMethod
from models.weights.weights import Weights


class ShortConv(nn.Module):
    """out_proj(c * conv(b * x)), where in_proj gives b, c and x. w: the block with these names."""

    def __init__(
        self, config: ModelConfig, w: Weights, tp: TensorParallel, *, layer_index: int, method: LinearMethod
    ) -> None:
        super().__init__()
        shape, size = config.recurrence, config.hidden_size
        assert isinstance(shape, ShortConvConfig)
        self.layer_index = layer_index
        names = ("b_proj", "c_proj", "x_proj")
        parts = [column_part(name, out_features=shape.num_channels, in_features=size, tp=tp) for name in names]
        merged = w.split("in_proj", dict.fromkeys(names, shape.num_channels))
        self.in_proj = ColumnLinear(merged, parts, has_bias=shape.has_bias, method=method)
        # [channels of this rank, width] and [channels of this rank]
        whole = (shape.num_channels, 1, shape.conv_width)
        self.weight = (w / "conv").shard("weight", whole, dim=0, rank=tp.rank, size=tp.size)[:, 0]
        self.bias: torch.Tensor | None = None
        if shape.has_bias:
            self.bias = (w / "conv").shard("bias", whole[:1], dim=0, rank=tp.rank, size=tp.size)
        part = row_part("out_proj", out_features=size, in_features=shape.num_channels, tp=tp)
        self.out_proj = RowLinear(w, part, has_bias=shape.has_bias, method=method, tp=tp)

    @property
    def input_product(self) -> ColumnLinear:
        """See models.layers.norm.wanted_by."""
        return self.in_proj

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm, ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]; advances this layer's part of ctx.states."""
        assert ctx.states is not None, "the model has states"
        b, c, x = self.in_proj(hidden).chunk(3, dim=-1)
        return self.out_proj(c * ctx.states.advance(self.layer_index, b * x, self._advance))

    def _advance(self, inputs: torch.Tensor, views: tuple[StateView, ...], rows: StateMetadata) -> torch.Tensor:
        """See models.context.Advance. inputs: [T, channels of this rank]."""
        return causal_conv(inputs, self.weight, self.bias, views[0], rows, has_silu=False)
