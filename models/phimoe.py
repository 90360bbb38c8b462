"""Decoder layer of Phi-3.5-MoE (arXiv:2404.14219): Mixtral with layer norms, biases and SparseMixer routing.

Its longrope has a factor on cosines and sines for short requests and one for long ones (models.config.rope).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.moe import SparseMLP
from models.layers.routing import ExpertNames


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    names = ExpertNames(gate="w1", up="w3", down="w2")
    mlp = SparseMLP(parts.config, parts.w / "block_sparse_moe", parts.tp, parts.method, names)
    return DecoderLayer(parts.config, parts.w, parts.self_attention(parts.attention()), mlp)


PhiMoe = partial(CausalLM, make_layer=make_layer)
