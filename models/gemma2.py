"""Gemma 2 (arXiv:2408.00118): norms before and behind attention and MLP, capped logits, every other layer a window.

Its caps and scales are in ModelConfig.scales, its windows in ModelConfig.sliding_windows.
"""

from __future__ import annotations

import torch
from torch import nn

from models.config import ModelConfig
from models.context import ForwardContext
from models.layers.attention import Attention, SelfAttention
from models.layers.branch import Normed
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import make_cos_sin_caches
from models.parallel import TensorParallel
from models.quantization.registry import make_linear_method
from models.weights import Weights


class Gemma2(nn.Module):
    """The whole model; see models.registry.build for its contract."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel) -> None:
        super().__init__()
        method = make_linear_method(config)
        cos_sin_caches = make_cos_sin_caches(config, device=w.device, dtype=w.dtype)

        def make_layer(layer_index: int, w_layer: Weights) -> nn.Module:
            attention = Attention(config, tp, layer_index=layer_index, cos_sin_cache=cos_sin_caches[layer_index])
            self_attn = SelfAttention(config, w_layer / "self_attn", tp, method=method, attention=attention)
            return sandwich(config, w_layer, self_attn, GatedMLP(config, w_layer / "mlp", tp, method))

        self.decoder = Decoder(config, w, tp, make_layer=make_layer)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden [T, hidden_size]."""
        return self.decoder(input_ids, ctx)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        return self.decoder.compute_logits(hidden)


def sandwich(config: ModelConfig, w: Weights, self_attn: nn.Module, mlp: nn.Module) -> nn.Module:
    """A layer with a norm before and behind each branch. w: of the layer."""
    size = config.hidden_size
    return DecoderLayer(
        config,
        w,
        Normed(self_attn, RMSNorm(config, w, "post_attention_layernorm", size=size)),
        Normed(mlp, RMSNorm(config, w, "post_feedforward_layernorm", size=size)),
        mlp_norm="pre_feedforward_layernorm",
    )
