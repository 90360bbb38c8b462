"""Decoder layer of GLM-4.5 to 4.7 (arXiv:2508.06471), dots.llm1 (arXiv:2506.05767) and Solar Open: V3's experts.

They are routed as DeepSeek-V3's. GLM rotates half of each head; some have a norm on each query and key head.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.routing import ExpertNames

NAMES = ExpertNames(shared="shared_experts")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(has_head_norms=parts.config.qk_norm == "head"))
    return DecoderLayer(parts.config, parts.w, self_attn, parts.mlp(names=NAMES))


Glm4Moe = partial(CausalLM, make_layer=make_layer)
