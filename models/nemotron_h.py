"""Layer of Nemotron-H (arXiv:2504.03624) and Nemotron 3: one mixer behind one norm.

The mixer is Mamba-2, attention without positions, an MLP or a mixture of experts; MLPs have no gate.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, LayerParts, MixerLayer
from models.layers.mamba2 import Mamba2
from models.layers.routing import ExpertNames

NAMES = ExpertNames(shared="shared_experts")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config, layer, w = parts.config, parts.layer_index, parts.w / "mixer"
    mixer: nn.Module
    if config.states[layer] is not None:
        mixer = Mamba2(config, w, parts.tp, layer_index=layer, method=parts.method)
    elif config.caches[layer] is not None:
        mixer = parts.self_attention(parts.attention(), w)
    else:
        mixer = parts.mlp(w, NAMES)
    return MixerLayer(parts.norm("norm"), mixer, takes_context=config.bare_layers[layer])


NemotronH = partial(CausalLM, make_layer=make_layer, last_norm="norm_f", embedding="embeddings")
