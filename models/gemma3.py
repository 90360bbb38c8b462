"""Gemma 3, text (arXiv:2503.19786): Gemma 2 without caps, with a norm on each query and key head, and two ropes.

Five layers of six see a window and turn positions by a small base, the sixth sees all and turns by a large one
(ModelConfig.sliding_windows and ropes).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.gemma2 import sandwich
from models.layers.causal_lm import CausalLM, LayerParts


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    return sandwich(parts, parts.self_attention(parts.attention(has_head_norms=True)), parts.gated_mlp())


Gemma3 = partial(CausalLM, make_layer=make_layer)
