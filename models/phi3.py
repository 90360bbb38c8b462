"""Phi-3 and Phi-4 (arXiv:2404.14219, 2412.08905, 2503.01743): Llama, whose checkpoints merge q, k, v and gate, up.

Longer contexts turn positions by longrope, and Phi-4-mini turns only a share of each head: models/layers/rotary.py.
"""

from __future__ import annotations

import torch
from torch import nn

from models.config import ModelConfig
from models.context import ForwardContext
from models.layers.attention import Attention, SelfAttention
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.mlp import GatedMLP
from models.layers.rotary import make_cos_sin_caches
from models.parallel import TensorParallel
from models.quantization.registry import make_linear_method
from models.weights import Weights


class Phi3(nn.Module):
    """The whole model; see models.registry.build for its contract."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel) -> None:
        super().__init__()
        method = make_linear_method(config)
        cos_sin_caches = make_cos_sin_caches(config, device=w.device, dtype=w.dtype)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}

        def make_layer(layer_index: int, w_layer: Weights) -> nn.Module:
            w_attn = (w_layer / "self_attn").split("qkv_proj", qkv)
            w_mlp = (w_layer / "mlp").split("gate_up_proj", gate_up)
            attention = Attention(config, tp, layer_index=layer_index, cos_sin_cache=cos_sin_caches[layer_index])
            self_attn = SelfAttention(config, w_attn, tp, method=method, attention=attention)
            return DecoderLayer(config, w_layer, self_attn, GatedMLP(config, w_mlp, tp, method))

        self.decoder = Decoder(config, w, tp, make_layer=make_layer)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden [T, hidden_size]."""
        return self.decoder(input_ids, ctx)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        return self.decoder.compute_logits(hidden)
