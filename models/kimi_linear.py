"""Decoder layer of Kimi-Linear (arXiv:2510.26692): Kimi delta attention or latent attention, then DeepSeek's MLP.

No layer rotates by positions. Checkpoints have the dense MLP and the experts under either of two names.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from models.layers.causal_lm import CausalLM, DecoderLayer, LayerParts
from models.layers.kimi_delta import KimiDelta
from models.layers.latent_attention import LatentAttention
from models.layers.routing import ExpertNames

NAMES = ExpertNames(gate="w1", up="w3", down="w2", shared="shared_experts")


def make_layer(parts: LayerParts) -> nn.Module:
    """Return one layer; see models.layers.causal_lm."""
    config, w, layer = parts.config, parts.w, parts.layer_index
    mixer: nn.Module
    if config.caches[layer] is None:
        mixer = KimiDelta(config, w / "self_attn", parts.tp, layer_index=layer, method=parts.method)
    else:
        mixer = LatentAttention(
            config,
            w / "self_attn",
            parts.tp,
            layer_index=layer,
            method=parts.method,
            cos_sin_cache=parts.cos_sin_cache,
        )
    # The published name, and the one that transformers uses: in files for the dense layer, in memory for experts
    if config.sparse_layers[layer]:
        block = w.first_of("block_sparse_moe", "mlp", tensor=f"{NAMES.router}.weight")
    else:
        block = w.first_of("mlp", "block_sparse_moe", tensor="gate_proj.weight")
    return DecoderLayer(config, w, mixer, parts.mlp(w / block, NAMES))


KimiLinear = partial(CausalLM, make_layer=make_layer)
