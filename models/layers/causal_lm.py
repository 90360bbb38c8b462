"""The causal language model that all families share; a family is a function that makes one layer of its LayerParts.

CausalLM prepares what all layers have in common, then has its Decoder made of the family's layers.
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
from models.layers.norm import RMSNorm
from models.layers.rotary import make_cos_sin_caches
from models.parallel import TensorParallel
from models.quantization.linear_method import LinearMethod
from models.weights.weights import Weights


@dataclass(frozen=True)
class LayerParts:
    """What one layer is made of, and its usual parts, made on request. w: the layer's Weights."""

    config: ModelConfig
    w: Weights
    tp: TensorParallel
    method: LinearMethod
    layer_index: int
    cos_sin_cache: torch.Tensor

    def attention(self, *, has_head_norms: bool = False) -> Attention:
        """Attention between its projections. has_head_norms: RMS norms of each query and key head."""
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
        """Attention with its projections. w: theirs, unless they are at `self_attn`."""
        w = self.w / "self_attn" if w is None else w
        return SelfAttention(self.config, w, self.tp, method=self.method, attention=attention)

    def gated_mlp(self, w: Weights | None = None) -> GatedMLP:
        """Return the dense MLP. w: its weights, unless they are at `mlp`."""
        return GatedMLP(self.config, self.w / "mlp" if w is None else w, self.tp, self.method)

    def norm(self, name: str) -> RMSNorm:
        """RMS norm of hidden_size."""
        return RMSNorm(self.config, self.w, name, size=self.config.hidden_size)


class CausalLM(nn.Module):
    """The whole model; see models.registry.build for its contract.

    make_layer: called once per layer, in order; for what it makes see DecoderLayer.forward. has_fp32_rope: positions
    are turned in fp32, else in the model's dtype.
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
