"""Decoder layer of OLMo-2 (arXiv:2501.00656): norms after attention and MLP, and norms over all of q and all of k.

OLMo 3 (arXiv:2512.13961) adds sliding windows in three of four layers, whose RoPE has no context extension. RoPE is
computed in fp32, as transformers does for these models.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.attention import WidthNormedAttention
from models.layers.branches import Normed
from models.layers.causal_lm import CausalLM, LayerParts, ResidualLayer


def make_layer(parts: LayerParts, *, attention_norm: str = "post_attention_layernorm") -> nn.Module:
    """Return one layer; see models.layers.causal_lm. attention_norm: the checkpoint's name of the norm behind it."""
    attention = WidthNormedAttention(parts.config, parts.w / "self_attn", parts.tp, parts.attention())
    self_attn, mlp = parts.self_attention(attention), parts.mlp()
    return ResidualLayer(
        Normed(self_attn, parts.norm(attention_norm)),
        Normed(mlp, parts.norm("post_feedforward_layernorm")),
    )


Olmo2 = partial(CausalLM, make_layer=make_layer, has_fp32_rope=True)
