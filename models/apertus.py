"""Decoder layer of Apertus (arXiv:2509.14233): Llama with norms of query and key heads, and xIELU without a gate."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    return DecoderLayer(
        parts.config,
        parts.w,
        parts.self_attention(parts.attention(has_head_norms=True)),
        parts.mlp(),
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
    )


Apertus = partial(CausalLM, make_layer=make_layer)
