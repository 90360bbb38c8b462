"""Qwen3 (arXiv:2505.09388): Llama with an RMS norm on each query and key head."""

from __future__ import annotations

import torch
from torch import nn

from models.config import ModelConfig
from models.context import ForwardContext
from models.layers.attention import Attention, SelfAttention
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import make_cos_sin_caches
from models.parallel import TensorParallel
from models.quantization.registry import make_linear_method
from models.weights import Weights


class Qwen3(nn.Module):
    """The whole model; see models.registry.build for its contract."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel) -> None:
        super().__init__()
        method = make_linear_method(config)
        cos_sin_caches = make_cos_sin_caches(config, device=w.device, dtype=w.dtype)

        def make_layer(layer_index: int, w_layer: Weights) -> nn.Module:
            attention = Attention(
                config,
                tp,
                layer_index=layer_index,
                cos_sin_cache=cos_sin_caches[layer_index],
                q_norm=RMSNorm(config, w_layer / "self_attn", "q_norm", size=config.head_dim),
                k_norm=RMSNorm(config, w_layer / "self_attn", "k_norm", size=config.head_dim),
            )
            self_attn = SelfAttention(config, w_layer / "self_attn", tp, method=method, attention=attention)
            return DecoderLayer(config, w_layer, self_attn, GatedMLP(config, w_layer / "mlp", tp, method))

        self.decoder = Decoder(config, w, tp, make_layer=make_layer)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden [T, hidden_size]."""
        return self.decoder(input_ids, ctx)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        return self.decoder.compute_logits(hidden)
