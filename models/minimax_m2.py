"""Decoder layer of MiniMax-M2 (MiniMax, 2025): norms over all of q and all of k, and experts in every layer.

RoPE rotates the first half of each head. The experts' scores are sigmoids, to which a bias is added for the choice.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.attention import WidthNormedAttention
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.routing import ExpertNames

NAMES = ExpertNames(gate="w1", up="w3", down="w2", bias="e_score_correction_bias")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    attention = WidthNormedAttention(parts.config, parts.w / "self_attn", parts.tp, parts.attention())
    # Names in published checkpoints, or those of transformers 5 in memory
    w_mlp = parts.w / ("mlp" if parts.w.shape_of("mlp.gate.weight") else "block_sparse_moe")
    return DecoderLayer(parts.config, parts.w, parts.self_attention(attention), parts.mlp(w_mlp, NAMES))


MiniMaxM2 = partial(CausalLM, make_layer=make_layer)
