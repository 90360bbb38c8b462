"""Decoder layer of Qwen3 (arXiv:2505.09388) and Qwen3-MoE (§2 there).

Qwen3 is Llama with an RMS norm on each query and key head. Qwen3-MoE has mixtures of experts in all or some layers.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(has_head_norms=True))
    return DecoderLayer(parts.config, parts.w, self_attn, parts.mlp())


Qwen3 = partial(CausalLM, make_layer=make_layer)
