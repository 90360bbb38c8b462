"""Decoder layer of Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side, then a gated MLP.

Constants multiply the inputs and outputs of each (ModelConfig.multipliers, Mamba2Config.multipliers).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from models.context import ForwardContext
from models.layers.branches import Scaled
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.mamba2 import Mamba2
from models.parallel import whole


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config = parts.config
    mlp = Scaled(parts.mlp(parts.w / "feed_forward"), config.multipliers.mlp_output)
    return DecoderLayer(config, parts.w, BothMixers(parts), mlp, mlp_norm="pre_ff_layernorm")


FalconH1 = partial(CausalLM, make_layer=make_layer, last_norm="final_layernorm")


class BothMixers(nn.Module):
    """The sum of a recurrence and attention over the same input, each times a constant."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        config = parts.config
        self.factors = config.multipliers
        self.mamba = Mamba2(config, parts.w / "mamba", parts.tp, layer_index=parts.layer_index, method=parts.method)
        self.self_attn = parts.self_attention(parts.attention())

    def forward(self, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """hidden: [T, hidden_size] → [T, hidden_size]."""
        factors = self.factors
        mixed = whole(self.mamba(hidden, ctx)) * factors.recurrence_output
        attended = whole(self.self_attn(hidden * factors.attention_input, ctx)) * factors.attention_output
        return mixed + attended
