"""Decoder layer of EXAONE 4 (arXiv:2507.11407): norms after attention and MLP, and on each query and key head.

With sliding windows, full-attention layers have no rotary positions (ModelConfig.ropes).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.branches import Normed
from models.layers.causal_lm import CausalLM, LayerParts, ResidualLayer


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(has_head_norms=True))
    return ResidualLayer(
        Normed(self_attn, parts.norm("post_attention_layernorm")),
        Normed(parts.mlp(), parts.norm("post_feedforward_layernorm")),
    )


Exaone4 = partial(CausalLM, make_layer=make_layer)
