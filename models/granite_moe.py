"""Decoder layer of Granite 3 with mixtures of experts (IBM, 3.0 language models): Granite with experts for every MLP.

All experts are stored in two tensors. The shared kind has one more expert, beside the block of the others.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts, Scaled
from models.layers.moe import SparseMLP
from models.layers.routing import ExpertNames


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config = parts.config
    factor = config.multipliers.residual
    names = ExpertNames(all_gate_up="input_linear.weight", all_down="output_linear.weight", router="router.layer")
    size = 0 if config.experts is None else config.experts.shared_intermediate_size
    w_shared = (
        (parts.w / "shared_mlp")
        .split("input_linear", {"gate_proj": size, "up_proj": size})
        .split("output_linear", {"down_proj": config.hidden_size})
    )
    mlp = SparseMLP(config, parts.w / "block_sparse_moe", parts.tp, parts.method, names, w_shared)
    self_attn = Scaled(parts.self_attention(parts.attention()), factor)
    return DecoderLayer(config, parts.w, self_attn, Scaled(mlp, factor))


GraniteMoe = partial(CausalLM, make_layer=make_layer)
