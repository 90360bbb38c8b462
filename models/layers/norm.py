"""RMSNorm and LayerNorm, alone or fused with the residual addition before it, and SplitRMSNorm over a shared width.

The variants of RMS norms (ModelConfig.norm) differ only in the weight passed to kernels.elementwise.reference.rms_norm:
Llama's has the model's dtype, OLMo-2's and Gemma's are fp32, and Gemma's checkpoints store the weight minus 1. "layer"
is a LayerNorm without bias, "layer_bias" one with; norms of query and key heads are RMS norms in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from kernels.linear.eight_bits import add_rms_norm_rounded, round_rows
from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm, sum_experts_add_rms_norm
from models.config.model_config import ModelConfig
from models.parallel import LateExperts, LayerOutput, PartialSum, TensorParallel, whole
from models.weights.weights import Weights


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, replicated on every rank. eps: default is the config's."""

    def __init__(self, config: ModelConfig, w: Weights, name: str, *, size: int, eps: float | None = None) -> None:
        super().__init__()
        self.weight = _prepare(config, (w / name).tensor("weight", (size,)))
        self.eps = config.rms_norm_eps if eps is None else eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] → normalised, same shape."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: LayerOutput, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual stream and normalise the sum: (normed, new residual), each [..., size]."""
        if isinstance(x, PartialSum):
            return x.add_rms_norm(residual, self.weight, self.eps)
        if isinstance(x, LateExperts):
            normed, residual = sum_experts_add_rms_norm(x.experts, residual, self.weight, self.eps, None)
            assert isinstance(normed, torch.Tensor)
            return normed, residual
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_rounded(
        self, x: LayerOutput, residual: torch.Tensor, rounding: Rounding
    ) -> tuple[RoundedRows, torch.Tensor]:
        """Do what add() does, and round the normed rows. x, residual: [T, size]."""
        if isinstance(x, LateExperts):
            rounded, residual = sum_experts_add_rms_norm(x.experts, residual, self.weight, self.eps, rounding)
            assert isinstance(rounded, RoundedRows)
            return rounded, residual
        if isinstance(x, PartialSum):
            normed, residual = self.add(x, residual)
            return round_rows(normed, rounding), residual
        return add_rms_norm_rounded(x, residual, self.weight, self.eps, rounding)


class UnitRMSNorm(nn.Module):
    """The weight of an RMS norm without one: ones."""

    def __init__(self, w: Weights, *, size: int) -> None:
        super().__init__()
        self.weight = torch.ones(size, dtype=w.dtype, device=w.device)


class LayerNorm(nn.Module):
    """Norm by mean and variance over the last dimension, replicated on every rank. Same contract as RMSNorm."""

    def __init__(self, config: ModelConfig, w: Weights, name: str, *, size: int) -> None:
        super().__init__()
        self.weight = (w / name).tensor("weight", (size,)).float()
        self.bias = (w / name).tensor("bias", (size,)).float() if config.norm == "layer_bias" else None
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] → normalised, same shape."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: LayerOutput, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See RMSNorm.add."""
        return add_layer_norm(whole(x), residual, self.weight, self.bias, self.eps)

    def add_rounded(
        self, x: LayerOutput, residual: torch.Tensor, rounding: Rounding
    ) -> tuple[RoundedRows, torch.Tensor]:
        """See RMSNorm.add_rounded."""
        normed, residual = self.add(x, residual)
        return round_rows(normed, rounding), residual


def hidden_norm(config: ModelConfig, w: Weights, name: str) -> RMSNorm | LayerNorm:
    """Make the config's norm over hidden_size."""
    make = LayerNorm if config.norm in ("layer", "layer_bias") else RMSNorm
    return make(config, w, name, size=config.hidden_size)


def add_and_norm(
    norm: RMSNorm | LayerNorm, hidden: LayerOutput, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add hidden to the residual stream, which begins with it if residual is None; see RMSNorm.add."""
    if residual is not None:
        return norm.add(hidden, residual)
    residual = whole(hidden)
    return norm(residual), residual


@dataclass(frozen=True)
class WantedInput:
    """How a branch wants its input: rounded, or with the norm before it left to itself; neither: normed."""

    rounding: Rounding | None
    takes_norm: Callable[[torch.Tensor], bool] | None  # called with what is to be added and normed, [T, size]


def wanted_by(branch: nn.Module) -> WantedInput:
    """Return how a branch wants its input: as its property `input_product`, if it has it, else as itself.

    That is the one product that reads the branch's input; None: several read it, or something else. What wants its
    input in some way has a property `rounding`, a method `takes_norm`, or both.
    """
    reader = getattr(branch, "input_product", branch)
    return WantedInput(getattr(reader, "rounding", None), getattr(reader, "takes_norm", None))


def add_and_norm_as_wanted(
    norm: RMSNorm | LayerNorm, hidden: LayerOutput, residual: torch.Tensor | None, wanted: WantedInput
) -> tuple[torch.Tensor | RoundedRows | LateNorm, torch.Tensor]:
    """Compute add_and_norm, or leave it to the branch, and round the normed rows; both only where there is a residual.

    hidden, residual: [T, size], as for add_and_norm; returns (normed, new residual). With a LateNorm the new residual
    is undefined until the branch has run.
    """
    if residual is None:
        return add_and_norm(norm, hidden, residual)
    takes_norm = wanted.takes_norm if isinstance(norm, RMSNorm) else None
    if takes_norm is not None and isinstance(hidden, torch.Tensor) and takes_norm(hidden):
        late = LateNorm(hidden, residual, norm.weight, norm.eps, torch.empty_like(residual))
        return late, late.new_residual
    if wanted.rounding is not None:
        return norm.add_rounded(hidden, residual, wanted.rounding)
    return norm.add(hidden, residual)


class SplitRMSNorm(nn.Module):
    """RMS norm over a dimension that is split over ranks in equal parts; equally many ranks may hold each part.

    size: the whole dimension; this rank holds part `rank` of `num_parts`.
    """

    def __init__(
        self, config: ModelConfig, w: Weights, name: str, tp: TensorParallel, *, size: int, rank: int, num_parts: int
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = _prepare(config, (w / name).shard("weight", (size,), dim=0, rank=rank, size=num_parts))
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, size / num_parts] → normalised by the mean square over all ranks."""
        if self.tp.size == 1:
            return rms_norm(x, self.weight, self.eps)
        x_fp32 = x.float()
        mean_square = self.tp.all_reduce(x_fp32.square().mean(-1, keepdim=True)) / self.tp.size
        normed = (x_fp32 * torch.rsqrt(mean_square + self.eps)).to(self.weight.dtype)
        return (self.weight * normed).to(x.dtype)


def _prepare(config: ModelConfig, weight: torch.Tensor) -> torch.Tensor:
    if config.norm == "gemma":
        # in place: the sum of tensors without values, in another one, imports torch._dynamo
        return weight.to(torch.float32, copy=True).add_(1)
    return weight.float() if config.norm == "olmo2" else weight
