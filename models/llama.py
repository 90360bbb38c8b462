"""Decoder layer of Llama (arXiv:2307.09288, 2407.21783) and of models that differ from it only in config.json.

Mistral (arXiv:2310.06825) adds a sliding window, Qwen2 (arXiv:2407.10671) a bias on q, k and v, and Qwen2-MoE (§2.2.2
there) mixtures of experts in all or some layers; SmolLM3 has layers without positions, Gemma (arXiv:2403.08295) a
scaled embedding, GELU and norms with weight + 1.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention())
    return DecoderLayer(parts.config, parts.w, self_attn, parts.mlp())


Llama = partial(CausalLM, make_layer=make_layer)
