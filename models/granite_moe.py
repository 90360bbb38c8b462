"""Decoder layer of Granite 3 with mixtures of experts (IBM, 3.0 language models): Granite with experts for every MLP.

All experts are stored in two tensors. The shared kind has one more expert, beside the block of the others.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.branches import Scaled
from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.moe import SparseMLP
from models.layers.routing import ExpertNames
from models.weights.weights import Weights

NAMES = ExpertNames(all_gate_up="input_linear.weight", all_down="output_linear.weight", router="router.layer")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    factor = parts.config.multipliers.residual
    self_attn = Scaled(parts.self_attention(parts.attention()), factor)
    return DecoderLayer(parts.config, parts.w, self_attn, Scaled(make_experts(parts), factor))


def make_experts(parts: LayerParts) -> SparseMLP:
    """Make a layer's experts."""
    config = parts.config
    size = 0 if config.experts is None else config.experts.shared_intermediate_size
    w = parts.w / "block_sparse_moe"
    return SparseMLP(config, w, parts.tp, parts.method, NAMES, shared_weights(parts, size))


def shared_weights(parts: LayerParts, size: int) -> Weights:
    """Return the weights of the MLP that all tokens use, `size` wide, under the usual names."""
    return (
        (parts.w / "shared_mlp")
        .split("input_linear", {"gate_proj": size, "up_proj": size})
        .split("output_linear", {"down_proj": parts.config.hidden_size})
    )


GraniteMoe = partial(CausalLM, make_layer=make_layer)
