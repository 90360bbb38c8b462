"""Decoder layer of LFM2 (Liquid AI), dense and with experts: a short convolution or attention, then an MLP.

Attention has an RMS norm on each query and key head.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.routing import ExpertNames
from models.layers.short_conv import ShortConv

NAMES = ExpertNames(gate="w1", up="w3", down="w2", bias="expert_bias")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config, layer = parts.config, parts.layer_index
    mixer: nn.Module
    if config.states[layer] is None:
        w = (parts.w / "self_attn").split("out_proj", {"o_proj": config.hidden_size})
        mixer = parts.self_attention(parts.attention(has_head_norms=True, names=("q_layernorm", "k_layernorm")), w)
    else:
        mixer = ShortConv(config, parts.w / "conv", parts.tp, layer_index=layer, method=parts.method)
    w_mlp = parts.w / "feed_forward"
    if not config.sparse_layers[layer]:
        width = config.mlp_size(layer)
        for stored, name, size in (
            ("w1", "gate_proj", width),
            ("w3", "up_proj", width),
            ("w2", "down_proj", config.hidden_size),
        ):
            w_mlp = w_mlp.split(stored, {name: size})
    mlp = parts.mlp(w_mlp, NAMES)
    return DecoderLayer(config, parts.w, mixer, mlp, attention_norm="operator_norm", mlp_norm="ffn_norm")


Lfm2 = partial(CausalLM, make_layer=make_layer, last_norm="embedding_norm")
