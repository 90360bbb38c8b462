"""Decoder layers of Qwen3 (arXiv:2505.09388) and Qwen3-MoE (§2 there).

Qwen3 is Llama with an RMS norm on each query and key head. Qwen3-MoE has mixtures of experts in all or some layers.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, LayerParts
from models.layers.decoder import DecoderLayer
from models.layers.moe import make_mlp


def make_qwen3_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(has_head_norms=True))
    return DecoderLayer(parts.config, parts.w, self_attn, parts.gated_mlp())


Qwen3 = partial(CausalLM, make_layer=make_qwen3_layer)


def make_qwen3_moe_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = parts.self_attention(parts.attention(has_head_norms=True))
    mlp = make_mlp(parts.config, parts.w / "mlp", parts.tp, parts.method, parts.layer_index)
    return DecoderLayer(parts.config, parts.w, self_attn, mlp)


Qwen3Moe = partial(CausalLM, make_layer=make_qwen3_moe_layer)
