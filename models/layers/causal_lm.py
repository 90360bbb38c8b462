"""CausalLM: the causal language model of every family. A family is a function that makes one layer from LayerParts.

CausalLM prepares the parts that all layers share, then builds a Decoder from the family's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.attention import Attention, SelfAttention
from models.layers.decoder import Decoder
from models.layers.linear import make_linear_method
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rotary import make_cos_sin_caches
from models.parallel import TensorParallel
from models.quantization.linear_method import LinearMethod
from models.weights.weights import Weights


@dataclass(frozen=True)
class LayerParts:
    """Factory of one layer's usual parts. w: the layer's Weights."""

    config: ModelConfig
    w: Weights
    tp: TensorParallel
    method: LinearMethod
    layer_index: int
    cos_sin_cache: torch.Tensor

    def attention(self, *, has_head_norms: bool = False) -> Attention:
        """Make Attention without its projections. has_head_norms: add RMS norms over each query and key head."""
        w, size = self.w / "self_attn", self.config.head_dim
        return Attention(
            self.config,
            self.tp,
            layer_index=self.layer_index,
            cos_sin_cache=self.cos_sin_cache,
            q_norm=RMSNorm(self.config, w, "q_norm", size=size) if has_head_norms else None,
            k_norm=RMSNorm(self.config, w, "k_norm", size=size) if has_head_norms else None,
        )

    def self_attention(self, attention: nn.Module, w: Weights | None = None) -> SelfAttention:
        """Make attention with its projections. w: their Weights, by default those below `self_attn`."""
        w = self.w / "self_attn" if w is None else w
        return SelfAttention(self.config, w, self.tp, method=self.method, attention=attention)

    def mlp(self, w: Weights | None = None) -> nn.Module:
        """Make the layer's MLP, dense or a mixture of experts. w: its Weights, by default those below `mlp`."""
        make = SparseMLP if self.config.sparse_layers[self.layer_index] else GatedMLP
        return make(self.config, self.w / "mlp" if w is None else w, self.tp, self.method)

    def norm(self, name: str) -> RMSNorm:
        """Make an RMS norm over hidden_size."""
        return RMSNorm(self.config, self.w, name, size=self.config.hidden_size)


class CausalLM(nn.Module):
    """The whole model; models.build.Model is its contract.

    make_layer: called once per layer, in order; DecoderLayer.forward is the contract of its result. has_fp32_rope:
    RoPE is computed in fp32, otherwise in the model's dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        *,
        make_layer: Callable[[LayerParts], nn.Module],
        has_fp32_rope: bool = False,
    ) -> None:
        super().__init__()
        method = make_linear_method(config)
        caches = make_cos_sin_caches(config, device=w.device, dtype=torch.float32 if has_fp32_rope else w.dtype)
        self.decoder = Decoder(
            config,
            w,
            tp,
            make_layer=lambda i, w_layer: make_layer(LayerParts(config, w_layer, tp, method, i, caches[i])),
        )

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids: [T] int64 → hidden [T, hidden_size]."""
        return self.decoder(input_ids, ctx)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size] → [N, vocab_size]."""
        return self.decoder.compute_logits(hidden)
