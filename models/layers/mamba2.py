"""Mamba2: a selective state space in place of attention, or beside it (arXiv:2405.21060).

A layer keeps the last inputs of its convolution and a matrix for each head of each request (LayerState). Heads are
split over ranks. Groups of heads, which share B and C, are split with them; where ranks outnumber groups, each rank has
the B and C of its own group, and the norm over a group's channels sums over the ranks that hold them.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows
from kernels.ops import causal_conv, grouped_gated_norm, mamba2, mamba2_dt
from kernels.states import StateMetadata, StateView
from models.config.mamba2 import Mamba2Config
from models.config.model_config import ModelConfig
from models.context import ForwardContext
from models.layers.linear import ColumnLinear, RowLinear, row_part
from models.parallel import LayerOutput, TensorParallel
from models.quantization.linear_method import LinearMethod, LinearPart
from models.weights.weights import Weights

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Mamba2(nn.Module):
    """out_proj(norm(y, z)), where y is the scan over the convolution of x, B and C. w: the block with these names."""

    def __init__(
        self, config: ModelConfig, w: Weights, tp: TensorParallel, *, layer_index: int, method: LinearMethod
    ) -> None:
        super().__init__()
        shape = config.recurrence
        assert isinstance(shape, Mamba2Config)
        self.shape = shape
        self.layer_index = layer_index
        self.eps = config.rms_norm_eps
        self.tp = tp
        self.num_group_shares = min(tp.size, shape.num_groups)
        self.group_rank = tp.rank * self.num_group_shares // tp.size
        # Of the projection's outputs that this rank has: z, x, B, C, dt
        self.sizes = [size // num for size, (_, num) in zip(shape.part_sizes.values(), self._shares(), strict=True)]
        self.in_proj = self._read_in_proj(w, config.hidden_size, method)
        self.factors = self._make_factors(w)
        # [channels of this rank, width] and [channels of this rank]
        self.conv_weight = self._read_channels(w / "conv1d", "weight", (1, shape.conv_width))[:, 0]
        self.conv_bias = self._read_channels(w / "conv1d", "bias", ()) if shape.has_conv_bias else None
        # [heads of this rank] fp32
        self.a = -self._read_heads(w, "A_log").exp()
        self.d, self.dt_bias = self._read_heads(w, "D"), self._read_heads(w, "dt_bias")
        self.norm_weight: torch.Tensor | None = None
        if shape.has_norm:
            weight = (w / "norm").shard("weight", (shape.size,), dim=0, rank=tp.rank, size=tp.size)
            self.norm_weight = weight.float() if shape.has_fp32_norm else weight
        part = row_part("out_proj", out_features=config.hidden_size, in_features=shape.size, tp=tp)
        self.out_proj = RowLinear(w, part, has_bias=shape.has_out_bias, method=method, tp=tp)

    @property
    def input_product(self) -> ColumnLinear | None:
        """See models.layers.norm.wanted_by."""
        return self.in_proj if self.shape.in_multiplier == 1.0 else None

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm, ctx: ForwardContext) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]; advances this layer's part of ctx.states."""
        assert ctx.states is not None, "the model has states"
        shape = self.shape
        if isinstance(hidden, torch.Tensor) and shape.in_multiplier != 1.0:
            hidden = hidden * shape.in_multiplier
        projected = self.in_proj(hidden)
        if self.factors is not None:
            projected = projected * self.factors
        z, inputs = projected.split((self.sizes[0], sum(self.sizes[1:])), dim=-1)
        y = ctx.states.advance(self.layer_index, inputs, self._advance)
        normed = grouped_gated_norm(
            y,
            z,
            self.norm_weight,
            self.eps,
            group_size=shape.size // shape.num_groups,
            has_norm_first=shape.has_norm_first,
            all_reduce=self._sum_over_group if self.tp.size > shape.num_groups else None,
        )
        return self.out_proj(normed)

    def _advance(self, inputs: torch.Tensor, views: tuple[StateView, ...], rows: StateMetadata) -> torch.Tensor:
        """See models.context.Advance. inputs: [T, x, B and C of the convolution, then dt]; returns [T, channels]."""
        shape, (_, size, groups, _, heads) = self.shape, self.sizes
        channels, dt = inputs.split((size + 2 * groups, heads), dim=-1)
        mixed = causal_conv(channels, self.conv_weight, self.conv_bias, views[0], rows, has_silu=True)
        x, b, c = mixed.split((size, groups, groups), dim=-1)
        steps = mamba2_dt(dt, self.dt_bias, shape.time_step_limits)
        x, b, c = x.unflatten(-1, (heads, -1)), *(part.unflatten(-1, (-1, shape.state_size)) for part in (b, c))
        return mamba2(x, b, c, steps, self.a, self.d, views[1], rows).flatten(1)

    def _shares(self) -> list[tuple[int, int]]:
        """Return (rank, number of shares) of z, x, B, C and dt."""
        heads, groups = (self.tp.rank, self.tp.size), (self.group_rank, self.num_group_shares)
        return [heads, heads, groups, groups, heads]

    def _read_in_proj(self, w: Weights, hidden_size: int, method: LinearMethod) -> ColumnLinear:
        """Read this rank's share of the input projection: of each of its parts, or all of it."""
        sizes = self.shape.part_sizes
        if self.tp.size == 1:  # as it is stored: its parts need not end at a quantisation's blocks
            parts = [LinearPart("in_proj", sum(sizes.values()), hidden_size, dim=0, rank=0, size=1)]
        else:
            w = w.split("in_proj", {f"{name}_proj": size for name, size in sizes.items()})
            parts = [
                LinearPart(f"{name}_proj", size, hidden_size, dim=0, rank=rank, size=num_shares)
                for (name, size), (rank, num_shares) in zip(sizes.items(), self._shares(), strict=True)
            ]
        return ColumnLinear(w, parts, has_bias=self.shape.has_in_bias, method=method)

    def _make_factors(self, w: Weights) -> torch.Tensor | None:
        """Return the constants on this rank's projected values, or None if all are 1."""
        factors = self.shape.multipliers
        if all(factor == 1.0 for factor in factors):
            return None
        parts = [
            torch.full((size,), factor, dtype=torch.float32) for size, factor in zip(self.sizes, factors, strict=True)
        ]
        return torch.cat(parts).to(w.device, w.dtype)

    def _read_channels(self, w: Weights, name: str, rest: tuple[int, ...]) -> torch.Tensor:
        """Read this rank's part of a tensor of the convolution, [channels of x, B and C, *rest]."""
        sizes = list(self.shape.part_sizes.values())[1:4]
        whole, start, shards = sum(sizes), 0, []
        for size, (rank, num_shares) in zip(sizes, self._shares()[1:4], strict=True):
            width = size // num_shares
            first = start + rank * width
            shards.append(w.slice(name, (whole, *rest), dim=0, start=first, stop=first + width))
            start += size
        return torch.cat(shards)

    def _read_heads(self, w: Weights, name: str) -> torch.Tensor:
        """Read this rank's numbers of a tensor [num_heads], as they are stored, in fp32."""
        share = self.shape.num_heads // self.tp.size
        start = self.tp.rank * share
        return w.stored(name, (self.shape.num_heads,), _FLOATS, start=start, stop=start + share).float()

    def _sum_over_group(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum [T, 1] over the ranks with the same group as this one."""
        by_group = sums.new_zeros(sums.shape[0], self.shape.num_groups)
        own = by_group[:, self.group_rank : self.group_rank + 1]
        own.copy_(sums)
        return self.tp.all_reduce(by_group)[:, self.group_rank : self.group_rank + 1]
