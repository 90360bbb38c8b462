"""Decoder layer of Hunyuan (arXiv:2411.02265): Llama with an RMS norm on each query and key head after RoPE."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.routing import ExpertNames

NAMES = ExpertNames(router="gate.wg", shared="shared_mlp")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    attention = parts.attention(has_head_norms=True, names=("query_layernorm", "key_layernorm"), norms_rotated=True)
    return DecoderLayer(parts.config, parts.w, parts.self_attention(attention), parts.mlp(names=NAMES))


HunYuan = partial(CausalLM, make_layer=make_layer)
