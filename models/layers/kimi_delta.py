"""KimiDelta: the token mixer of Kimi delta attention, with its projections, convolutions, state and output norm.

Kimi Team, "Kimi Linear", 2025 (arXiv:2510.26692), §3: the gated delta rule with a gate for each key dimension. Both the
gates of states (f) and those of outputs (g) are products of two matrices. The first ones, which every rank has whole,
are in one product with all other projections: that of output gates, then the inputs of the state in the order of
LayerState, so that these are not copied.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows
from kernels.ops import causal_conv, delta_gates, gated_delta_rule, gated_delta_step, gated_rms_norm
from kernels.states import StateMetadata, StateView
from models.config.kimi_delta import KimiDeltaConfig
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.delta_net import read_per_head
from models.layers.linear import ColumnLinear, RowLinear, column_part, row_part
from models.parallel import LayerOutput, TensorParallel
from models.quantization.linear_method import LinearMethod, LinearPart
from models.weights.weights import Weights

# Where transformers has the tensors of gates in memory, and saves them if told not to convert
_GATE_BLOCK = "forget_gate"


class KimiDelta(nn.Module):
    """Tokens mixed by the delta rule with gates by dimension, over this rank's heads. The pool has the states, in fp32.

    w: the Weights that hold the layer's tensors.
    """

    def __init__(
        self, config: ModelConfig, w: Weights, tp: TensorParallel, *, layer_index: int, method: LinearMethod
    ) -> None:
        super().__init__()
        shape, hidden_size = config.recurrence, config.hidden_size
        assert isinstance(shape, KimiDeltaConfig)
        self.shape = shape
        self.layer_index = layer_index
        self.eps = config.rms_norm_eps
        size, dim = shape.num_channels, shape.head_dim
        self.num_heads = shape.num_heads // tp.size
        in_memory = f"{_GATE_BLOCK}.f_a_proj"
        prefix = f"{_GATE_BLOCK}." if w.shape_of(f"{in_memory}.weight") is not None else ""
        parts = [_replicated("g_a_proj", dim, hidden_size)]
        parts += [column_part(f"{name}_proj", out_features=size, in_features=hidden_size, tp=tp) for name in "qkv"]
        parts.append(column_part("b_proj", out_features=shape.num_heads, in_features=hidden_size, tp=tp))
        parts.append(_replicated(f"{prefix}f_a_proj", dim, hidden_size))
        self.in_proj = ColumnLinear(w, parts, has_bias=False, method=method)
        self.gate_proj, self.output_gate_proj = (
            ColumnLinear(
                w, [column_part(name, out_features=size, in_features=dim, tp=tp)], has_bias=False, method=method
            )
            for name in (f"{prefix}f_b_proj", "g_b_proj")
        )
        # [channels of this rank, width]
        self.conv_weight = _read_convolution(w, shape, tp)
        # fp32, [heads of this rank] and [channels of queries of this rank]: logarithms of the decays, and what is added
        # to the gates' products before the softplus
        self.a_log = _read_decays(w, f"{prefix}A_log", shape.num_heads, tp)
        self.dt_bias = read_per_head(w, f"{prefix}dt_bias", size, tp)
        self.norm_weight = (w / "o_norm").tensor("weight", (dim,))
        out_part = row_part("o_proj", out_features=hidden_size, in_features=size, tp=tp)
        self.out_proj = RowLinear(w, out_part, has_bias=False, method=method, tp=tp)

    @property
    def input_product(self) -> ColumnLinear:
        """See models.layers.norm.wanted_by."""
        return self.in_proj

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm, ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]; advances this layer's states in ctx.states."""
        assert ctx.states is not None
        products = self.in_proj(hidden)
        dim = self.shape.head_dim
        mixed = ctx.states.advance(self.layer_index, products[:, dim:], self._advance)
        gate = self.output_gate_proj(products[:, :dim].contiguous())
        heads = (self.num_heads, dim)
        normed = gated_rms_norm(
            mixed.unflatten(-1, heads), gate.unflatten(-1, heads), self.norm_weight, self.eps, activation="sigmoid"
        )
        return self.out_proj(normed.flatten(1))

    def _advance(self, inputs: torch.Tensor, views: tuple[StateView, ...], metadata: StateMetadata) -> torch.Tensor:
        """See models.context.Advance: inputs are those of the convolutions, b, then f_a; returns [T, channels]."""
        dim = self.shape.head_dim
        size, heads = self.num_heads * dim, (self.num_heads, dim)
        channels, b, low = inputs.split((3 * size, self.num_heads, dim), dim=-1)
        mixed = causal_conv(channels, self.conv_weight, None, views[0], metadata, has_silu=True)
        q, k, v = (part.unflatten(-1, heads) for part in mixed.chunk(3, dim=-1))
        gates = self.gate_proj(low.contiguous()).unflatten(-1, heads), b, self.a_log, self.dt_bias
        if metadata.max_query_len == 1:  # one kernel less
            out = gated_delta_step(q, k, v, *gates, views[1], metadata, scale=dim**-0.5)
        else:
            out = gated_delta_rule(q, k, v, *delta_gates(*gates), views[1], metadata, scale=dim**-0.5)
        return out.flatten(1)


def _replicated(name: str, out_features: int, in_features: int) -> LinearPart:
    return LinearPart(name, out_features, in_features, dim=0, rank=0, size=1)


def _read_convolution(w: Weights, shape: KimiDeltaConfig, tp: TensorParallel) -> torch.Tensor:
    """Read this rank's weights of the convolutions over queries, keys and values: [channels, width]."""
    size = shape.num_channels
    counts = dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), size)
    if w.shape_of("conv1d.weight") is not None:  # as transformers has them in memory
        counts = {"conv1d": 3 * size}
    tensors = [(w / name).tensor("weight", (count, 1, shape.conv_width)) for name, count in counts.items()]
    parts = torch.cat(tensors).squeeze(1).chunk(3)
    return torch.cat([part.chunk(tp.size)[tp.rank] for part in parts])


def _read_decays(w: Weights, name: str, num_heads: int, tp: TensorParallel) -> torch.Tensor:
    """Read this rank's logarithms of decays, which files store as [1, 1, heads, 1] or [heads], in fp32."""
    if w.shape_of(name) == (num_heads,):
        return read_per_head(w, name, num_heads, tp)
    return read_per_head(w, name, num_heads, tp, before=2, behind=1)
