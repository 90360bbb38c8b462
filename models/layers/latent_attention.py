"""Latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, §2.1): its projections, and what the cache keeps.

The cache keeps one latent of each token, of which a head's keys and values are products. It is one KV head of rank +
rope_dim numbers, whose first `rank` numbers are the value in the absorbed form: q · (W_K c) = (W_Kᵀ q) · c.
kernels/attention/latent.py chooses between that form and expanded keys and values. Every rank has all latents and its
share of the query heads.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from kernels.attention.latent import LatentHeads, latent_attention
from kernels.elementwise.reference import KVScales
from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows
from kernels.ops import norm_rope_write_latent
from models.config.latent import EPS, LatentConfig
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.attention import read_kv_scales
from models.layers.linear import ColumnLinear, RowLinear, column_part, row_part
from models.layers.norm import RMSNorm
from models.layers.rotary import latent_score_factor
from models.parallel import LayerOutput, TensorParallel
from models.quantization.fp8 import Fp8Params
from models.quantization.int8 import Int8Params
from models.quantization.linear_method import LinearMethod, LinearPart
from models.weights.weights import Weights


class LatentAttention(nn.Module):
    """Attention with all its projections. w: the block that holds them.

    cos_sin_cache, query_factors: this layer's tables (models.layers.rotary).
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        *,
        layer_index: int,
        method: LinearMethod,
        cos_sin_cache: torch.Tensor,
        query_factors: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        assert config.latent is not None
        self.sizes = sizes = config.latent
        self.layer_index = layer_index
        self.num_heads = config.num_heads // tp.size
        rope = config.ropes[layer_index]
        self.scale = config.multipliers.attention * (1.0 if rope is None else latent_score_factor(rope))
        self.cos_sin_cache = cos_sin_cache
        self.query_factors = query_factors
        # One scale for what is both key and value, as in vLLM
        scales = read_kv_scales(w)
        self.kv_scales = KVScales(k=scales.k, v=scales.k)
        self.q_norm: RMSNorm | None = None
        width = sizes.rank + sizes.rope_dim
        to_latents = [LinearPart("kv_a_proj_with_mqa", width, config.hidden_size, dim=0, rank=0, size=1)]
        if sizes.q_rank is not None:
            to_latents.insert(0, LinearPart("q_a_proj", sizes.q_rank, config.hidden_size, dim=0, rank=0, size=1))
            self.q_norm = RMSNorm(config, w, "q_a_layernorm", size=sizes.q_rank, eps=EPS)
        self.to_latents = ColumnLinear(w, to_latents, has_bias=sizes.has_bias, method=method)
        part = column_part(
            "q_proj" if sizes.q_rank is None else "q_b_proj",
            out_features=config.num_heads * sizes.head_dim,
            in_features=sizes.q_rank or config.hidden_size,
            tp=tp,
        )
        self.q_proj = ColumnLinear(w, [part], has_bias=False, method=method)
        self.kv_norm = RMSNorm(config, w, "kv_a_layernorm", size=sizes.rank, eps=EPS)
        # [heads of this rank, nope_dim, rank] and [heads of this rank, rank, v_head_dim], which lies transposed
        self.to_keys, self.to_values = _read_heads(config, sizes, w, tp, method)
        part = row_part(
            "o_proj", out_features=config.hidden_size, in_features=config.num_heads * sizes.v_head_dim, tp=tp
        )
        self.o_proj = RowLinear(w, part, has_bias=sizes.has_bias, method=method, tp=tp)

    @property
    def input_product(self) -> ColumnLinear | None:
        """See models.layers.norm.wanted_by."""
        return None if self.q_norm is None else self.to_latents

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm, ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]; writes this layer's part of ctx.kv_caches."""
        sizes, kv = self.sizes, ctx.kv_caches[self.layer_index]
        assert kv is not None
        latents = self.to_latents(hidden)
        if self.q_norm is None or sizes.q_rank is None:  # two products read the same rows
            q = self.q_proj(hidden)
        else:
            q_latent, latents = latents.split((sizes.q_rank, sizes.rank + sizes.rope_dim), dim=-1)
            q = self.q_proj(self.q_norm(q_latent.contiguous()))
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        scales = kv.scales_or(self.kv_scales)
        assert isinstance(scales.k, float), "latents have one scale for all heads"
        metadata = ctx.attention[kv.table]
        q_rope = norm_rope_write_latent(
            latents,
            q_rope,
            self.kv_norm.weight,
            self.kv_norm.eps,
            ctx.positions,
            self.cos_sin_cache,
            kv.keys,
            metadata.slot_mapping,
            scale=scales.k,
            is_interleaved=sizes.is_interleaved,
        )
        if self.query_factors is not None:
            factors = self.query_factors.index_select(0, ctx.positions)
            q_nope, q_rope = (q_nope * factors).to(q_nope.dtype), (q_rope * factors).to(q_rope.dtype)
        heads = LatentHeads(self.to_keys, self.to_values)
        values = latent_attention(
            ctx.backend, q_nope, q_rope, kv.keys, heads, metadata, scale=self.scale, kv_scales=scales
        )
        return self.o_proj(values.flatten(1))


def _read_heads(
    config: ModelConfig, sizes: LatentConfig, w: Weights, tp: TensorParallel, method: LinearMethod
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read this rank's heads of kv_b_proj, each its key's rows, then its value's, in the model's dtype.

    A quantised matrix is expanded once: its product with the identity is the matrix itself, if the identity is rounded
    row by row, not by a static scale of activations.
    """
    num_outputs = config.num_heads * (sizes.nope_dim + sizes.v_head_dim)
    part = column_part("kv_b_proj", out_features=num_outputs, in_features=sizes.rank, tp=tp)
    if w.device.type == "meta":  # the shapes of adapters are asked for, or the checkpoint's headers are checked
        if w.headers is not None:
            method.load(w, [part])
        matrix = torch.empty(part.outputs, sizes.rank, dtype=w.dtype, device=w.device)
    else:
        identity = torch.eye(sizes.rank, dtype=w.dtype, device=w.device)
        params = method.load(w, [part])
        if isinstance(params, Fp8Params | Int8Params):
            params = dataclasses.replace(params, input_scale=None)
        matrix = method.apply(params, identity, None).t()
    keys, values = matrix.unflatten(0, (-1, sizes.nope_dim + sizes.v_head_dim)).split(
        (sizes.nope_dim, sizes.v_head_dim), dim=1
    )
    return keys.contiguous(), values.contiguous().transpose(1, 2)
