"""Attention modules: projections, head norms, RoPE, the write to the paged KV pool and the attention backend.

read_kv_scales reads the scales of an FP8 KV pool under the names that quantised checkpoints use: one number of a layer,
or one of each KV head, for keys and for values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from kernels.elementwise.reference import KVScales
from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows
from kernels.ops import norm_rope_write_kv
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.errors import ModelError
from models.layers.linear import ColumnLinear, RowLinear, qkv_parts, row_part
from models.layers.norm import RMSNorm, SplitRMSNorm, UnitRMSNorm
from models.parallel import LayerOutput, TensorParallel
from models.quantization.linear_method import LinearMethod, LinearPart
from models.weights.weights import Weights

# Relative to self_attn: compressed-tensors and Quark; ModelOpt; compressed-tensors before 0.8; AutoFP8.
# Each is the factor that the stored fp8 number is multiplied by
_K_NAMES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_V_NAMES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
# For attention computed in fp8, which is not supported: read, so that they do not count as unread tensors
_UNUSED_NAMES = ("q_scale", "prob_scale", "prob_output_scale")


class Attention(nn.Module):
    """Attention between the projections, over this rank's heads. The caller owns the KV pool.

    cos_sin_cache, query_factors: this layer's tables (models.layers.rotary). q_norm, k_norm: norms over each head,
    norms_rotated: after RoPE instead of before it. is_interleaved: RoPE rotates neighbouring dimensions. sinks:
    [num_heads] fp32, a logit for each head beside those of keys.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        *,
        layer_index: int,
        cos_sin_cache: torch.Tensor,
        query_factors: torch.Tensor | None = None,
        q_norm: RMSNorm | UnitRMSNorm | None = None,
        k_norm: RMSNorm | UnitRMSNorm | None = None,
        is_interleaved: bool = False,
        norms_rotated: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_heads = config.num_heads // tp.size
        self.scale = config.multipliers.attention
        self.softcap = config.multipliers.attention_softcap
        self.eps = config.rms_norm_eps
        cache = config.cache(layer_index)
        self.sliding_window = cache.window
        self.chunk = cache.chunk
        self.cos_sin_cache = cos_sin_cache
        self.query_factors = query_factors
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.is_interleaved = is_interleaved
        self.norms_rotated = norms_rotated
        self.sinks = sinks

    def forward(self, qkv: torch.Tensor, ctx: ForwardContext, kv_scales: KVScales) -> torch.Tensor:
        """qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]; writes this layer's part of ctx.kv_caches.

        kv_scales: the checkpoint's, for an FP8 pool only.
        Returns [T, num_heads * head_dim].
        """
        kv = ctx.kv_caches[self.layer_index]
        assert kv is not None
        q = norm_rope_write_kv(
            qkv,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            ctx.positions,
            self.cos_sin_cache,
            kv.keys,
            kv.values,
            ctx.attention[kv.table].slot_mapping,
            num_heads=self.num_heads,
            kv_scales=kv.scales_or(kv_scales),
            is_interleaved=self.is_interleaved,
            norms_rotated=self.norms_rotated,
        )
        if self.query_factors is not None:
            q = (q * self.query_factors.index_select(0, ctx.positions)).to(q.dtype)
        return self.attend(q, ctx, kv_scales)

    def attend(self, q: torch.Tensor, ctx: ForwardContext, kv_scales: KVScales) -> torch.Tensor:
        """Attend rotated queries [T, num_heads, head_dim]; returns [T, num_heads * head_dim of values]."""
        kv = ctx.kv_caches[self.layer_index]
        assert kv is not None
        out = ctx.backend.forward(
            q,
            kv.keys,
            kv.values,
            ctx.attention[kv.table],
            scale=self.scale,
            sliding_window=self.sliding_window,
            chunk=self.chunk,
            softcap=self.softcap,
            sinks=self.sinks,
            kv_scales=kv.scales_or(kv_scales),
        )
        return out.flatten(1)


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


class SelfAttention(nn.Module):
    """Attention with its QKV and output projections. attention: a module with the signature of Attention.forward."""

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        *,
        layer_index: int,
        method: LinearMethod,
        attention: nn.Module,
    ) -> None:
        super().__init__()
        self.attention = attention
        parts = qkv_parts(config, tp, layer_index)
        keys = parts[1] if len(parts) > 1 else None  # None: keys and values are another layer's
        self.kv_scales = read_kv_scales(w, keys, head_dim=config.cache(layer_index).head_dim)
        self._outputs = [part.outputs for part in parts]
        self.has_output_gate = config.has_output_gate
        if config.has_output_gate:
            w, parts = with_output_gates(w, parts, head_dim=config.cache(layer_index).head_dim)
        self.qkv_proj = ColumnLinear(w, parts, has_bias=config.has_qkv_bias, method=method)
        num_inputs = config.num_heads * config.cache(layer_index).v_head_dim
        part = row_part("o_proj", out_features=config.hidden_size, in_features=num_inputs, tp=tp)
        self.o_proj = RowLinear(w, part, has_bias=config.has_output_bias, method=method, tp=tp)

    @property
    def input_product(self) -> ColumnLinear:
        """See models.layers.norm.wanted_by."""
        return self.qkv_proj

    @property
    def key_bias(self) -> torch.Tensor | None:
        """Return the bias added to this rank's keys before RoPE, [num_kv_heads * head_dim], or None."""
        bias = self.qkv_proj.bias
        if bias is None or len(self._outputs) == 1:
            return None
        return bias[: sum(self._outputs)].split(self._outputs)[1]

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm, ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]."""
        qkv = self.qkv_proj(hidden)
        if not self.has_output_gate:
            return self.o_proj(self.attention(qkv, ctx, self.kv_scales))
        qkv, gates = qkv.split((sum(self._outputs), self._outputs[0]), dim=-1)
        return self.o_proj(self.attention(qkv, ctx, self.kv_scales) * gates.sigmoid())


def with_output_gates(w: Weights, parts: Sequence[LinearPart], *, head_dim: int) -> tuple[Weights, list[LinearPart]]:
    """Return the projections with the gates of the heads' outputs at the end; parts: those without, queries first.

    The checkpoint's q_proj has each head's query and gate side by side, [head_dim, ...] each.
    """
    queries, *others = parts
    bands = {f"{kind}_{head}": head_dim for head in range(queries.out_features // head_dim) for kind in ("q", "gate")}
    num_heads = queries.outputs // head_dim
    own = range(queries.rank * num_heads, (queries.rank + 1) * num_heads)
    heads = {
        kind: [LinearPart(f"{kind}_{head}", head_dim, queries.in_features, dim=0, rank=0, size=1) for head in own]
        for kind in ("q", "gate")
    }
    return w.split(queries.name, bands), [*heads["q"], *others, *heads["gate"]]


def read_kv_scales(w: Weights, keys: LinearPart | None = None, *, head_dim: int = 0) -> KVScales:
    """Read a layer's scales, 1.0 where the checkpoint has none. w: those of self_attn. Raises ModelError.

    keys: the layer's projection to keys, whose heads of head_dim each may have scales of their own; None: any that has
    several scales is served with the largest, which fits every head.
    """
    for name in _UNUSED_NAMES:
        w.optional(name)
    k, v = _read_scales(w, _K_NAMES), _read_scales(w, _V_NAMES)
    if keys is not None:
        num_heads = keys.out_features // head_dim
        of_heads = [None if scales is None else _of_heads(scales, num_heads) for scales in (k, v)]
        if any(scales is not None and bool((scales != scales[0]).any()) for scales in of_heads):
            own = slice(keys.rank * num_heads // keys.size, (keys.rank + 1) * num_heads // keys.size)
            k, v = (torch.ones(num_heads, device=w.device) if scales is None else scales for scales in of_heads)
            return KVScales(k=k[own].contiguous(), v=v[own].contiguous())
    return KVScales(k=1.0 if k is None else float(k.max()), v=1.0 if v is None else float(v.max()))


def _of_heads(scales: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return [num_heads]: the scales if there is one for each head, in any shape; else the largest, which fits all."""
    if scales.numel() == num_heads:
        return scales.float().flatten()
    return scales.float().max().expand(num_heads)


def _read_scales(w: Weights, names: tuple[str, ...]) -> torch.Tensor | None:
    """Read the first name that exists, None if none does. Raises ModelError."""
    found = {name: scales for name in names if (scales := w.optional(name)) is not None}
    if not found:
        return None
    name, scales = next(iter(found.items()))
    if scales.numel() == 0 or not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"tensor {w.full_name(name)} must hold positive numbers, found {scales}")
    return scales
