"""Decoder layers of Gemma 2 and of Gemma 3's text model.

Gemma 2 (arXiv:2408.00118) has norms before and after attention and MLP, capped logits, and a sliding window in every
other layer. Its caps and multipliers are in ModelConfig.multipliers, its windows in ModelConfig.sliding_windows.

Gemma 3 (arXiv:2503.19786) has no caps, a norm on each query and key head, and two ropes: of every six layers, five have
a sliding window and a small rope base; the sixth has full attention and a large base (ModelConfig.sliding_windows and
ropes).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, LayerParts
from models.layers.decoder import DecoderLayer, Normed


def make_gemma2_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    return sandwich(parts, parts.self_attention(parts.attention()), parts.gated_mlp())


Gemma2 = partial(CausalLM, make_layer=make_gemma2_layer)


def sandwich(parts: LayerParts, self_attn: nn.Module, mlp: nn.Module) -> nn.Module:
    """Return a layer with a norm before and after each branch."""
    return DecoderLayer(
        parts.config,
        parts.w,
        Normed(self_attn, parts.norm("post_attention_layernorm")),
        Normed(mlp, parts.norm("post_feedforward_layernorm")),
        mlp_norm="pre_feedforward_layernorm",
    )


def make_gemma3_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    return sandwich(parts, parts.self_attention(parts.attention(has_head_norms=True)), parts.gated_mlp())


Gemma3 = partial(CausalLM, make_layer=make_gemma3_layer)
