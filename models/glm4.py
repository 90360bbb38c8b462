"""Decoder layer of GLM-4-0414 (arXiv:2406.12793): norms before and after both branches, gate and up merged.

RoPE rotates neighbouring dimensions in the first half of each head.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.branches import Normed
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    size = parts.config.intermediate_size
    w_mlp = (parts.w / "mlp").split("gate_up_proj", {"gate_proj": size, "up_proj": size})
    self_attn = parts.self_attention(parts.attention(is_interleaved=True))
    return DecoderLayer(
        parts.config,
        parts.w,
        Normed(self_attn, parts.norm("post_self_attn_layernorm")),
        Normed(parts.mlp(w_mlp), parts.norm("post_mlp_layernorm")),
    )


Glm4 = partial(CausalLM, make_layer=make_layer)
