"""Decoder layer of Command R7B, Command A (Cohere 2, arXiv:2504.00698) and A+: attention and MLP read the same norm.

RoPE rotates neighbouring dimensions, in layers with a sliding window only (ModelConfig.ropes), in fp32 with rounded
cosines and sines as in transformers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from models.context import ForwardContext
from models.layers.causal_lm import CausalLM, LayerParts
from models.layers.norm import LayerNorm, RMSNorm, add_and_norm
from models.layers.routing import ExpertNames
from models.parallel import LayerOutput, whole

NAMES = ExpertNames(shared="shared_experts")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(is_interleaved=True))
    return ParallelLayer(parts.norm("input_layernorm"), self_attn, parts.mlp(names=NAMES))


Cohere2 = partial(CausalLM, make_layer=make_layer, has_fp32_rope=True, has_rounded_angles=True)


class ParallelLayer(nn.Module):
    """Adds attention and MLP of one normalised input to the residual stream. Same contract as DecoderLayer.forward."""

    def __init__(self, norm: RMSNorm | LayerNorm, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.self_attn = self_attn
        self.mlp = mlp

    def forward(
        self, hidden: LayerOutput, residual: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[LayerOutput, torch.Tensor]:
        """hidden: [T, hidden_size], not yet added to residual (None: the first layer). Returns the same pair."""
        normed, residual = add_and_norm(self.norm, hidden, residual)
        # In transformers' order, which matters where sums are rounded
        residual = residual + whole(self.self_attn(normed, ctx))
        return self.mlp(normed), residual
