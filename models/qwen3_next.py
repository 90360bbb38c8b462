"""Decoder layer of Qwen3-Next and Qwen3.5: three layers of the gated delta rule to one of attention.

The output of each attention head is multiplied by the sigmoid of a gate, and RoPE rotates the first quarter of a head.
The MLP is dense, or a mixture with a shared expert as in Qwen2-MoE.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.delta_net import DeltaNet


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config = parts.config
    mixer: nn.Module
    if config.caches[parts.layer_index] is None:
        mixer = DeltaNet(
            config,
            parts.w / "linear_attn",
            parts.tp,
            layer_index=parts.layer_index,
            method=parts.method,
            eps=config.rms_norm_eps,
        )
    else:
        mixer = parts.self_attention(parts.attention(has_head_norms=True))
    return DecoderLayer(config, parts.w, mixer, parts.mlp())


Qwen3Next = partial(CausalLM, make_layer=make_layer)
