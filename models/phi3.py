"""Decoder layer of Phi-3 and Phi-4 (arXiv:2404.14219, 2412.08905, 2503.01743): Llama with merged q, k, v and gate, up.

Long-context models use longrope, and Phi-4-mini rotates only a share of each head: models/layers/rotary.py.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config = parts.config
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    w_attn = (parts.w / "self_attn").split("qkv_proj", qkv)
    w_mlp = (parts.w / "mlp").split("gate_up_proj", gate_up)
    return DecoderLayer(config, parts.w, parts.self_attention(parts.attention(), w_attn), parts.mlp(w_mlp))


Phi3 = partial(CausalLM, make_layer=make_layer)
