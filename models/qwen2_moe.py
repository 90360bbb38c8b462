"""Decoder layer of Qwen2-MoE (arXiv:2407.10671, §2.2.2): Qwen2 with mixtures of experts in all or some layers."""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, LayerParts
from models.layers.decoder import DecoderLayer
from models.layers.moe import make_mlp


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention())
    mlp = make_mlp(parts.config, parts.w / "mlp", parts.tp, parts.method, parts.layer_index)
    return DecoderLayer(parts.config, parts.w, self_attn, mlp)


Qwen2Moe = partial(CausalLM, make_layer=make_layer)
