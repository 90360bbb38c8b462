"""Linear layers split over ranks as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, §3).

Column layers split their outputs over ranks and need no communication; row layers split their inputs and end in the
only all-reduce. Merged layers compute several checkpoint matrices as one GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from kernels.linear.eight_bits import Int8Linear
from kernels.linear.late_norm import GateKind, LateNorm
from kernels.linear.onednn import Bf16Matrix, can_pack, pack
from kernels.linear.ops import DenseLinear
from kernels.linear.rounding import RoundedRows
from kernels.linear.w8a8 import quantize_matrix_int8
from models.config.model_config import ModelConfig
from models.lora.linear import with_adapters
from models.parallel import LayerOutput, TensorParallel
from models.quantization.int8 import Int8Params, make_int8_params
from models.quantization.linear_method import (
    LinearMethod,
    LinearParams,
    LinearPart,
    TakesGate,
    TakesNorm,
    TakesRoundedRows,
    rounding_of,
)
from models.quantization.schemes import PerLayer, Unquantized
from models.weights.weights import Weights


class ColumnLinear(nn.Module):
    """Matrices merged along their outputs; each LinearPart sets how its outputs split over ranks."""

    def __init__(self, w: Weights, parts: Sequence[LinearPart], *, has_bias: bool, method: LinearMethod) -> None:
        super().__init__()
        self.method = with_adapters(method, w)
        self.params = self.method.load(w, parts)
        self.rounding = rounding_of(self.method, self.params)  # how the op before may round x
        self.bias = _load_biases(w, parts) if has_bias else None
        self.norming = self.method if isinstance(self.method, TakesNorm) else None
        self.gating = self.method if not has_bias and isinstance(self.method, TakesGate) else None

    def forward(self, x: torch.Tensor | RoundedRows | LateNorm) -> torch.Tensor:
        """x: [T, in_features], whole → [T, outputs of this rank], the parts side by side."""
        if isinstance(x, LateNorm):
            return self.normed(x)
        return _apply(self.method, self.params, x, self.bias)

    def takes_norm(self, x: torch.Tensor) -> bool:
        """Return True if the addition of x to the residual stream and its norm are better left to this layer."""
        return self.norming is not None and self.norming.takes_norm(self.params, x)

    def normed(self, late: LateNorm, *, gate: GateKind = "", normed: torch.Tensor | None = None) -> torch.Tensor:
        """Compute kernels.linear.late_norm.normed_linear. Requires takes_norm(late.x)."""
        assert self.norming is not None
        return self.norming.apply_normed(self.params, late, self.bias, gate=gate, normed=normed)

    def gated(self, x: torch.Tensor | RoundedRows | LateNorm, *, is_gelu: bool) -> torch.Tensor | None:
        """Return silu_and_mul, or gelu_tanh_and_mul, of forward(x) where one kernel computes both faster; else None."""
        if self.gating is None or isinstance(x, RoundedRows):
            return None
        if isinstance(x, LateNorm):
            return self.normed(x, gate="gelu_tanh" if is_gelu else "silu")
        return self.gating.apply_gated(self.params, x, is_gelu=is_gelu) if self.gating.gates(self.params, x) else None


class RowLinear(nn.Module):
    """A matrix whose inputs are split over ranks. It sums the partial products, or the caller does if is_partial.

    It ends a branch, so the sum may be deferred: see TensorParallel.sum_late.
    """

    def __init__(
        self,
        w: Weights,
        part: LinearPart,
        *,
        has_bias: bool,
        method: LinearMethod,
        tp: TensorParallel,
        is_partial: bool = False,
    ) -> None:
        super().__init__()
        self.method = with_adapters(method, w)
        self.tp = tp
        self.is_partial = is_partial
        self.params = self.method.load(w, [part])
        self.rounding = rounding_of(self.method, self.params)  # how the op before may round x
        bias = (w / part.name).tensor("bias", (part.out_features,)) if has_bias else None
        # The sum over ranks must contain the bias only once
        self.bias = bias if tp.rank == 0 else None

    def forward(self, x: torch.Tensor | RoundedRows) -> LayerOutput:
        """x: [T, inputs of this rank] → [T, out_features], the same on every rank unless it is a partial sum."""
        out = _apply(self.method, self.params, x, self.bias)
        return out if self.is_partial else self.tp.sum_late(out)


class HeadProduct:
    """hidden @ weight.T + bias with the matrix of an LM head, which may share its rows with the embedding.

    Where the CPU wants another order, or the head is rounded, it holds a copy: each token reads the whole matrix.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, rounds: bool) -> None:
        """weight: [N, K]; bias: [N] or None. rounds: to 8-bit integers, as W8A8 does with linear layers."""
        self._bias = bias
        self._dense = DenseLinear()
        self._int8 = Int8Linear()
        self._weight: torch.Tensor | Bf16Matrix | None = None
        self._rounded: Int8Params | None = None
        if not rounds:
            self._weight = pack(weight) if can_pack(weight) else weight
            return
        self._rounded = make_int8_params(*quantize_matrix_int8(weight))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [T, K] → [T, N]."""
        if self._rounded is not None:
            params = self._rounded
            return self._int8(hidden, params.weight, params.scales, self._bias, input_scale=None)
        assert self._weight is not None
        return self._dense(hidden, self._weight, self._bias)


def column_part(name: str, *, out_features: int, in_features: int, tp: TensorParallel) -> LinearPart:
    """Return this rank's share of a matrix whose outputs are split over all ranks."""
    return LinearPart(name, out_features, in_features, dim=0, rank=tp.rank, size=tp.size)


def row_part(name: str, *, out_features: int, in_features: int, tp: TensorParallel) -> LinearPart:
    """Return this rank's share of a matrix whose inputs are split over all ranks."""
    return LinearPart(name, out_features, in_features, dim=1, rank=tp.rank, size=tp.size)


def qkv_parts(config: ModelConfig, tp: TensorParallel, layer_index: int) -> list[LinearPart]:
    """Return the layer's q_proj, k_proj and v_proj, or those it has. Ranks that outnumber KV heads share them."""
    cache = config.cache(layer_index)
    kv_shares = min(tp.size, cache.num_kv_heads)
    kv_rank = tp.rank * kv_shares // tp.size
    parts = [
        column_part("q_proj", out_features=config.num_heads * cache.head_dim, in_features=config.hidden_size, tp=tp)
    ]
    sizes = {"k_proj": cache.num_kv_heads * cache.head_dim, "v_proj": cache.num_kv_heads * cache.v_head_dim}
    for name in config.projections(layer_index)[1:]:
        parts.append(LinearPart(name, sizes[name], config.hidden_size, dim=0, rank=kv_rank, size=kv_shares))
    return parts


def make_linear_method(config: ModelConfig) -> LinearMethod:
    """Return the method of all linear layers; each layer's scheme is chosen when the layer is loaded."""
    return Unquantized() if config.quantization is None else PerLayer(config.quantization)


def _apply(
    method: LinearMethod, params: LinearParams, x: torch.Tensor | RoundedRows, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply rows as they are, or rounded ones, which only a method that asks for them gets."""
    if isinstance(x, RoundedRows):
        return cast("TakesRoundedRows", method).apply_rounded(params, x, bias)
    return method.apply(params, x, bias)


def _load_biases(w: Weights, parts: Sequence[LinearPart]) -> torch.Tensor:
    """Read the parts' biases, split and merged as their outputs are: [outputs of this rank]."""
    shards = [
        (w / part.name).shard("bias", (part.out_features,), dim=0, rank=part.rank, size=part.size) for part in parts
    ]
    return torch.cat(shards)
