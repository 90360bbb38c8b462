"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts for every MLP."""

from __future__ import annotations

import torch
from torch import nn

from models.config import ModelConfig
from models.context import ForwardContext
from models.layers.attention import Attention, SelfAttention
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.moe import ExpertNames, SparseMLP
from models.layers.rotary import make_cos_sin_caches
from models.parallel import TensorParallel
from models.quantization.registry import make_linear_method
from models.weights import Weights


class Mixtral(nn.Module):
    """The whole model; see models.registry.build for its contract."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel) -> None:
        super().__init__()
        method = make_linear_method(config)
        cos_sin_caches = make_cos_sin_caches(config, device=w.device, dtype=w.dtype)

        def make_layer(layer_index: int, w_layer: Weights) -> nn.Module:
            attention = Attention(config, tp, layer_index=layer_index, cos_sin_cache=cos_sin_caches[layer_index])
            self_attn = SelfAttention(config, w_layer / "self_attn", tp, method=method, attention=attention)
            # As published, or as transformers 5 calls it in memory
            w_mlp = w_layer / ("mlp" if w_layer.shape_of("mlp.gate.weight") else "block_sparse_moe")
            mlp = SparseMLP(config, w_mlp, tp, method, ExpertNames(gate="w1", up="w3", down="w2"))
            return DecoderLayer(config, w_layer, self_attn, mlp)

        self.decoder = Decoder(config, w, tp, make_layer=make_layer)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden [T, hidden_size]."""
        return self.decoder(input_ids, ctx)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        return self.decoder.compute_logits(hidden)
