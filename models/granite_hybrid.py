"""Decoder layer of Granite 4 (IBM): Mamba-2 or attention, then a mixture of experts with a shared one, or that alone.

The constants are those of Granite 3 (ModelConfig.multipliers).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.granite_moe import make_experts, shared_weights
from models.layers.branches import Scaled
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.mamba2 import Mamba2


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config, layer = parts.config, parts.layer_index
    factor = config.multipliers.residual
    mixer: nn.Module
    if config.states[layer] is None:
        mixer = parts.self_attention(parts.attention())
    else:
        mixer = Mamba2(config, parts.w / "mamba", parts.tp, layer_index=layer, method=parts.method)
    if config.sparse_layers[layer]:
        mlp: nn.Module = make_experts(parts)
    else:
        mlp = parts.mlp(shared_weights(parts, config.intermediate_size))
    return DecoderLayer(config, parts.w, Scaled(mixer, factor), Scaled(mlp, factor))


GraniteHybrid = partial(CausalLM, make_layer=make_layer)
