"""Decoder layer of OLMo-Hybrid: three layers of the gated delta rule to one of OLMo-2's attention.

Layers of the delta rule have their norms before attention and MLP, those of attention behind.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.delta_net import DeltaNet
from models.olmo2 import make_layer as make_attention_layer

# transformers, OlmoHybridGatedDeltaNet: whatever rms_norm_eps is
_OUTPUT_NORM_EPS = 1e-5


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config, w = parts.config, parts.w
    if config.states[parts.layer_index] is None:
        # transformers saves this norm under the name that it has in the other layers
        name = w.first_of("post_attention_layernorm", "feedforward_layer_norm", tensor="weight")
        return make_attention_layer(parts, attention_norm=name)
    mixer = DeltaNet(
        config,
        w / "linear_attn",
        parts.tp,
        layer_index=parts.layer_index,
        method=parts.method,
        eps=_OUTPUT_NORM_EPS,
    )
    return DecoderLayer(
        config, w, mixer, parts.mlp(), attention_norm="attention_layer_norm", mlp_norm="feedforward_layer_norm"
    )


OlmoHybrid = partial(CausalLM, make_layer=make_layer, has_fp32_rope=True)
