"""Granite 3 (IBM, dense): Llama with constant multipliers (ModelConfig.multipliers)."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.branches import Scaled
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    factor = parts.config.multipliers.residual
    self_attn = Scaled(parts.self_attention(parts.attention()), factor)
    return DecoderLayer(parts.config, parts.w, self_attn, Scaled(parts.mlp(), factor))


Granite = partial(CausalLM, make_layer=make_layer)
