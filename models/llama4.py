"""Decoder layer of Llama 4's text part (Meta, 2025): experts of scaled inputs, and layers with and without RoPE.

RoPE rotates neighbouring dimensions, in fp32, before a norm without weight. Queries of layers without RoPE grow with
their position. The other layers attend within chunks of positions (LayerCache.chunk).
"""

from __future__ import annotations

import dataclasses
from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.routing import ExpertNames

NAMES = ExpertNames(router="router", are_transposed=True)


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    rotates = parts.config.ropes[parts.layer_index] is not None
    if rotates:
        parts = dataclasses.replace(parts, query_factors=None)
    has_norms = rotates and parts.config.qk_norm == "unit"
    attention = parts.attention(has_unit_norms=has_norms, norms_rotated=True, is_interleaved=True)
    mlp = parts.mlp(parts.w / "feed_forward", NAMES)
    return DecoderLayer(parts.config, parts.w, parts.self_attention(attention), mlp)


Llama4 = partial(CausalLM, make_layer=make_layer, has_fp32_rope=True)
