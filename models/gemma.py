"""Decoder layer of Gemma 2 and of Gemma 3's text model.

Gemma 2 (arXiv:2408.00118) has norms before and after attention and MLP, capped logits, and a sliding window in every
other layer. Its caps and multipliers are in ModelConfig.multipliers, its windows in ModelConfig.sliding_windows.

Gemma 3 (arXiv:2503.19786) has no caps, a norm on each query and key head, and two ropes: of every six layers, five have
a sliding window and a small rope base; the sixth has full attention and a large base (ModelConfig.sliding_windows and
ropes).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.branches import Normed
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(has_head_norms=parts.config.qk_norm == "head"))
    return DecoderLayer(
        parts.config,
        parts.w,
        Normed(self_attn, parts.norm("post_attention_layernorm")),
        Normed(parts.mlp(), parts.norm("post_feedforward_layernorm")),
        mlp_norm="pre_feedforward_layernorm",
    )


Gemma = partial(CausalLM, make_layer=make_layer)
