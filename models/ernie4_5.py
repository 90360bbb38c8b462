"""Decoder layer of ERNIE 4.5 (its technical report, Baidu 2025): Llama whose RoPE rotates neighbouring dimensions.

RoPE is computed in fp32, as transformers does for this model.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.routing import ExpertNames

NAMES = ExpertNames(bias="moe_statics.e_score_correction_bias", shared="shared_experts")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(is_interleaved=True))
    return DecoderLayer(parts.config, parts.w, self_attn, parts.mlp(names=NAMES))


Ernie4_5 = partial(CausalLM, make_layer=make_layer, has_fp32_rope=True)
