"""Decoder layer of DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437), GLM-4.7-Flash and Mistral 4.

Llama with latent attention, and experts of which some are shared.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.latent_attention import LatentAttention
from models.layers.routing import ExpertNames

NAMES = ExpertNames(shared="shared_experts")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    self_attn = LatentAttention(
        parts.config,
        parts.w / "self_attn",
        parts.tp,
        layer_index=parts.layer_index,
        method=parts.method,
        cos_sin_cache=parts.cos_sin_cache,
        query_factors=parts.query_factors,
    )
    return DecoderLayer(parts.config, parts.w, self_attn, parts.mlp(names=NAMES))


DeepseekV3 = partial(CausalLM, make_layer=make_layer)
# transformers rotates in fp32 here
DeepseekV2 = partial(CausalLM, make_layer=make_layer, has_fp32_rope=True)
