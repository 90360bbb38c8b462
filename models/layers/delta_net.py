"""DeltaNet: the token mixer of the gated delta rule, with its projections, convolution, state and output norm.

S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024 (arXiv:2412.06464), figure 1. Ranks share key heads,
each with its value heads. All projections are one product: the output gates (z), then the inputs of the state in the
order of LayerState, so that neither are copied. Checkpoints quantise all of them, or all but the last (b, a).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows
from kernels.ops import causal_conv, delta_gates, gated_delta_rule, gated_delta_step, gated_rms_norm
from kernels.states import StateMetadata, StateView
from models.config.delta_net import DeltaNetConfig
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.linear import ColumnLinear, RowLinear, column_part, row_part
from models.parallel import LayerOutput, TensorParallel
from models.quantization.linear_method import LinearMethod, LinearPart
from models.weights.weights import Weights

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class _Sizes(NamedTuple):
    """Numbers of queries' and keys' channels, of values' channels and of value heads."""

    keys: int
    values: int
    heads: int


class DeltaNet(nn.Module):
    """Tokens mixed by the gated delta rule, over this rank's heads. The pool has the states, in float32.

    w: the Weights that hold the layer's tensors. eps: of the norm over each head's output.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        *,
        layer_index: int,
        method: LinearMethod,
        eps: float,
    ) -> None:
        super().__init__()
        shape = config.recurrence
        assert isinstance(shape, DeltaNetConfig)
        self.shape = shape
        self.layer_index = layer_index
        self.eps = eps
        whole = _Sizes(
            shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim, shape.num_value_heads
        )
        self.sizes = _Sizes(*(size // tp.size for size in whole))
        is_separate = shape.layout == "separate"
        w_in, parts = _LAYOUTS[shape.layout](w, shape, whole, config.hidden_size, tp)
        self.in_proj = ColumnLinear(w_in, parts, has_bias=False, method=method)
        # [channels of this rank, width]
        self.conv_weight = _read_convolution(w, shape, whole, tp)
        # [value heads of this rank] fp32: logarithms of the decays, and what is added to `a` before the softplus
        self.a_log, self.dt_bias = (read_per_head(w, name, whole.heads, tp) for name in ("A_log", "dt_bias"))
        self.norm_weight = (w / ("o_norm" if is_separate else "norm")).tensor("weight", (shape.value_dim,))
        out_part = row_part(
            "o_proj" if is_separate else "out_proj", out_features=config.hidden_size, in_features=whole.values, tp=tp
        )
        self.out_proj = RowLinear(w, out_part, has_bias=False, method=method, tp=tp)

    @property
    def input_product(self) -> ColumnLinear:
        """See models.layers.norm.wanted_by."""
        return self.in_proj

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm, ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]; advances this layer's states in ctx.states."""
        assert ctx.states is not None
        keys, values, heads = self.sizes
        z, inputs = self.in_proj(hidden).split((values, 2 * keys + values + 2 * heads), dim=-1)
        mixed = ctx.states.advance(self.layer_index, inputs, self._advance)
        by_head = (-1, self.shape.value_dim)
        normed = gated_rms_norm(mixed.unflatten(-1, by_head), z.unflatten(-1, by_head), self.norm_weight, self.eps)
        return self.out_proj(normed.flatten(1))

    def _advance(self, inputs: torch.Tensor, views: tuple[StateView, ...], metadata: StateMetadata) -> torch.Tensor:
        """See models.context.Advance: inputs are those of the convolution, then b and a; returns [T, values]."""
        keys, values, heads = self.sizes
        shape = self.shape
        channels, b, a = inputs.split((2 * keys + values, heads, heads), dim=-1)
        mixed = causal_conv(channels, self.conv_weight, None, views[0], metadata, has_silu=True)
        q, k, v = mixed.split((keys, keys, values), dim=-1)
        q, k = (part.unflatten(-1, (-1, shape.key_dim)) for part in (q, k))
        v, scale = v.unflatten(-1, (-1, shape.value_dim)), shape.key_dim**-0.5
        gates, max_beta = (a, b, self.a_log, self.dt_bias), shape.max_beta
        if metadata.max_query_len == 1:  # one kernel less
            out = gated_delta_step(q, k, v, *gates, views[1], metadata, scale=scale, max_beta=max_beta)
        else:
            out = gated_delta_rule(q, k, v, *delta_gates(*gates, max_beta=max_beta), views[1], metadata, scale=scale)
        return out.flatten(1)


def _grouped_parts(
    w: Weights, shape: DeltaNetConfig, whole: _Sizes, hidden_size: int, tp: TensorParallel
) -> tuple[Weights, list[LinearPart]]:
    """Find the projections in matrices whose outputs are grouped by key head (Qwen3-Next)."""
    repeat = shape.num_value_heads // shape.num_key_heads
    of_values = repeat * shape.value_dim
    sizes = {"q": shape.key_dim, "k": shape.key_dim, "v": of_values, "z": of_values, "b": repeat, "a": repeat}
    for merged, names in (("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba")):
        w = w.split(merged, {f"{name}_{head}": sizes[name] for head in range(shape.num_key_heads) for name in names})
    num_heads = shape.num_key_heads // tp.size
    own = range(tp.rank * num_heads, (tp.rank + 1) * num_heads)
    return w, [
        LinearPart(f"{name}_{head}", sizes[name], hidden_size, dim=0, rank=0, size=1)
        for name in "zqkvba"
        for head in own
    ]


def _flat_parts(
    w: Weights, shape: DeltaNetConfig, whole: _Sizes, hidden_size: int, tp: TensorParallel
) -> tuple[Weights, list[LinearPart]]:
    """Find the projections in matrices whose outputs are queries, keys and values one after the other (Qwen3.5)."""
    sizes = {"in_proj_z": whole.values, "q": whole.keys, "k": whole.keys, "v": whole.values}
    sizes |= {"in_proj_b": whole.heads, "in_proj_a": whole.heads}
    w = w.split("in_proj_qkv", {name: sizes[name] for name in "qkv"})
    return w, [column_part(name, out_features=size, in_features=hidden_size, tp=tp) for name, size in sizes.items()]


def _separate_parts(
    w: Weights, shape: DeltaNetConfig, whole: _Sizes, hidden_size: int, tp: TensorParallel
) -> tuple[Weights, list[LinearPart]]:
    """Find the projections, each a matrix of its own (OLMo-Hybrid)."""
    sizes = {"g_proj": whole.values, "q_proj": whole.keys, "k_proj": whole.keys, "v_proj": whole.values}
    sizes |= {"b_proj": whole.heads, "a_proj": whole.heads}
    return w, [column_part(name, out_features=size, in_features=hidden_size, tp=tp) for name, size in sizes.items()]


_LAYOUTS = {"grouped": _grouped_parts, "flat": _flat_parts, "separate": _separate_parts}


def _read_convolution(w: Weights, shape: DeltaNetConfig, whole: _Sizes, tp: TensorParallel) -> torch.Tensor:
    """Read this rank's weights of the convolution over queries, keys and values: [channels, width]."""
    sizes = {"q_conv1d": whole.keys, "k_conv1d": whole.keys, "v_conv1d": whole.values}
    if shape.layout == "separate":
        # transformers saves thirds of all channels under these names, though values have more channels than keys
        found = [w.shape_of(f"{name}.weight") for name in sizes]
        stored = [size if tensor is None else tensor[0] for size, tensor in zip(sizes.values(), found, strict=True)]
        counts = dict(zip(sizes, stored, strict=True)) if sum(stored) == sum(sizes.values()) else sizes
    else:
        counts = {"conv1d": sum(sizes.values())}
    tensors = [(w / name).tensor("weight", (count, 1, shape.conv_width)) for name, count in counts.items()]
    parts = torch.cat(tensors).squeeze(1).split(tuple(sizes.values()))
    return torch.cat([part.chunk(tp.size)[tp.rank] for part in parts])


def read_per_head(
    w: Weights, name: str, num_heads: int, tp: TensorParallel, *, before: int = 0, behind: int = 0
) -> torch.Tensor:
    """Read this rank's numbers of a tensor [num_heads], as they are stored, in fp32.

    before, behind: the dimensions of size 1 that the stored tensor has around that one.
    """
    share = num_heads // tp.size
    start = tp.rank * share
    shape = (*[1] * before, num_heads, *[1] * behind)
    return w.stored(name, shape, _FLOATS, dim=before, start=start, stop=start + share).float().flatten()
