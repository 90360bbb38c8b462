"""Decoder layer of Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in place of every MLP."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.moe import SparseMLP
from models.layers.routing import ExpertNames


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention())
    # Names in published checkpoints, or those of transformers 5 in memory
    w_mlp = parts.w / ("mlp" if parts.w.shape_of("mlp.gate.weight") else "block_sparse_moe")
    mlp = SparseMLP(parts.config, w_mlp, parts.tp, parts.method, ExpertNames(gate="w1", up="w3", down="w2"))
    return DecoderLayer(parts.config, parts.w, self_attn, mlp)


Mixtral = partial(CausalLM, make_layer=make_layer)
