"""Decoder layer of OLMo-2 (arXiv:2501.00656): norms after attention and MLP, and norms over all of q and all of k.

OLMo 3 (arXiv:2512.13961) adds sliding windows in three of four layers, whose RoPE has no context extension. RoPE is
computed in fp32, as transformers does for these models.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from kernels.elementwise.reference import KVScales
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.attention import Attention
from models.layers.causal_lm import CausalLM, LayerParts, Normed, ResidualLayer
from models.layers.linear import qkv_parts
from models.layers.norm import SplitRMSNorm
from models.parallel import TensorParallel
from models.weights.weights import Weights


def make_layer(parts: LayerParts, *, attention_norm: str = "post_attention_layernorm") -> nn.Module:
    """Return one layer; see models.layers.causal_lm. attention_norm: the checkpoint's name of the norm behind it."""
    attention = WidthNormedAttention(parts.config, parts.w / "self_attn", parts.tp, parts.attention())
    self_attn, mlp = parts.self_attention(attention), parts.mlp()
    return ResidualLayer(
        Normed(self_attn, parts.norm(attention_norm)),
        Normed(mlp, parts.norm("post_feedforward_layernorm")),
    )


Olmo2 = partial(CausalLM, make_layer=make_layer, has_fp32_rope=True)


class WidthNormedAttention(nn.Module):
    """Attention with an RMS norm over all query heads and one over all key heads, across ranks."""

    def __init__(self, config: ModelConfig, w: Weights, tp: TensorParallel, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        q, k, v = qkv_parts(config, tp, attention.layer_index)
        self.q_norm = SplitRMSNorm(config, w, "q_norm", tp, size=q.out_features, rank=q.rank, num_parts=q.size)
        self.k_norm = SplitRMSNorm(config, w, "k_norm", tp, size=k.out_features, rank=k.rank, num_parts=k.size)
        self.sizes = (q.outputs, k.outputs, v.outputs)

    def forward(self, qkv: torch.Tensor, ctx: ForwardContext, kv_scales: KVScales) -> torch.Tensor:
        """See Attention.forward."""
        q, k, v = qkv.split(self.sizes, dim=-1)
        return self.attention(torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1), ctx, kv_scales)
