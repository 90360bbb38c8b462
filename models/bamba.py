"""Decoder layer of Bamba (IBM): Mamba-2 or attention, of which half of each head is rotated, then a gated MLP."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.mamba2 import Mamba2


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config, layer = parts.config, parts.layer_index
    mixer: nn.Module
    if config.states[layer] is None:
        mixer = parts.self_attention(parts.attention())
    else:
        mixer = Mamba2(config, parts.w / "mamba", parts.tp, layer_index=layer, method=parts.method)
    mlp = parts.mlp(parts.w / "feed_forward")
    return DecoderLayer(config, parts.w, mixer, mlp, mlp_norm="pre_ff_layernorm")


Bamba = partial(CausalLM, make_layer=make_layer, last_norm="final_layernorm")
