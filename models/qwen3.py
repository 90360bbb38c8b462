"""Qwen3 (arXiv:2505.09388): Llama with an RMS norm on each query and key head."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, LayerParts
from models.layers.decoder import DecoderLayer


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(has_head_norms=True))
    return DecoderLayer(parts.config, parts.w, self_attn, parts.gated_mlp())


Qwen3 = partial(CausalLM, make_layer=make_layer)
