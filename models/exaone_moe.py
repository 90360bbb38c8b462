"""Decoder layer of K-EXAONE (arXiv:2601.01739): Llama with norms of heads, and experts routed as DeepSeek-V3's.

Layers without a sliding window have no rotary positions (ModelConfig.ropes).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.routing import ExpertNames

NAMES = ExpertNames(bias="e_score_correction_bias", shared="shared_experts")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(has_head_norms=True))
    return DecoderLayer(parts.config, parts.w, self_attn, parts.mlp(names=NAMES))


ExaoneMoe = partial(CausalLM, make_layer=make_layer)
