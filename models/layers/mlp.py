"""GatedMLP and PlainMLP: the feed-forward block with a gate and without."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from kernels.linear.eight_bits import gate_and_mul_rounded
from kernels.linear.late_norm import LateNorm
from kernels.linear.rounding import RoundedRows, Rounding
from kernels.ops import gelu_tanh_and_mul, relu_squared, silu_and_mul, xielu
from models.config.model_config import ModelConfig
from models.layers.linear import ColumnLinear, RowLinear, column_part, row_part
from models.parallel import LayerOutput, TensorParallel
from models.quantization.linear_method import LinearMethod
from models.weights.weights import Weights

_ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), the intermediate dimension split over ranks.

    intermediate_size: default is the config's. is_partial: the caller sums over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        method: LinearMethod,
        *,
        intermediate_size: int | None = None,
        is_partial: bool = False,
    ) -> None:
        super().__init__()
        intermediate_size = intermediate_size or config.intermediate_size
        self.activate_and_mul = _ACTIVATIONS[config.activation]
        self.is_gelu = config.activation == "gelu_tanh"
        self.gate_factor = config.multipliers.mlp_gate
        parts = [
            column_part(name, out_features=intermediate_size, in_features=config.hidden_size, tp=tp)
            for name in ("gate_proj", "up_proj")
        ]
        self.gate_up_proj = ColumnLinear(w, parts, has_bias=config.has_mlp_bias, method=method)
        part = row_part("down_proj", out_features=config.hidden_size, in_features=intermediate_size, tp=tp)
        self.down_proj = RowLinear(w, part, has_bias=config.has_mlp_bias, method=method, tp=tp, is_partial=is_partial)
        # the product of gates and ups may apply the activation, too
        self.gates_product = self.gate_factor == 1.0 and self.down_proj.rounding is None

    @property
    def rounding(self) -> Rounding | None:
        """How the norm before may round the hidden states."""
        return self.gate_up_proj.rounding

    def takes_norm(self, hidden: torch.Tensor) -> bool:
        """Return True if the addition of hidden to the residual stream and its norm are better left to this block."""
        return self.gates_product and self.gate_up_proj.takes_norm(hidden)

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]."""
        if self.gates_product:
            inner = self.gate_up_proj.gated(hidden, is_gelu=self.is_gelu)
            if inner is not None:
                return self.down_proj(inner)
        gate_up = self.gate_up_proj(hidden)
        if self.gate_factor != 1.0:
            gate_up.chunk(2, dim=-1)[0].mul_(self.gate_factor)
        rounding = self.down_proj.rounding
        if rounding is not None:
            return self.down_proj(gate_and_mul_rounded(gate_up, rounding, is_gelu=self.is_gelu))
        return self.down_proj(self.activate_and_mul(gate_up))


class PlainMLP(nn.Module):
    """down(activation(up(x))) with relu² or xIELU, the intermediate dimension split over ranks. See GatedMLP."""

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        method: LinearMethod,
        *,
        intermediate_size: int | None = None,
        is_partial: bool = False,
    ) -> None:
        super().__init__()
        size = intermediate_size or config.intermediate_size
        # [4]: see kernels.elementwise.reference.xielu; None: relu²
        self.constants = _read_xielu(w / "act_fn") if config.activation == "xielu" else None
        part = column_part("up_proj", out_features=size, in_features=config.hidden_size, tp=tp)
        self.up_proj = ColumnLinear(w, [part], has_bias=config.has_mlp_bias, method=method)
        part = row_part("down_proj", out_features=config.hidden_size, in_features=size, tp=tp)
        self.down_proj = RowLinear(w, part, has_bias=config.has_mlp_bias, method=method, tp=tp, is_partial=is_partial)

    @property
    def input_product(self) -> ColumnLinear:
        """See models.layers.norm.wanted_by."""
        return self.up_proj

    def forward(self, hidden: torch.Tensor | RoundedRows | LateNorm) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]."""
        inner = self.up_proj(hidden)
        return self.down_proj(relu_squared(inner) if self.constants is None else xielu(inner, self.constants))


def _read_xielu(w: Weights) -> torch.Tensor:
    """Read a layer's constants of xIELU; beta and eps are buffers, which a checkpoint may omit."""
    beta, eps = w.optional("beta"), w.optional("eps")
    slope = torch.tensor([0.5] if beta is None else [float(beta)], device=w.device, dtype=w.dtype)
    least = torch.tensor([-1e-6] if eps is None else [float(eps)], device=w.device, dtype=w.dtype)
    above = functional.softplus(w.tensor("alpha_p", (1,)))
    below = slope + functional.softplus(w.tensor("alpha_n", (1,)))
    return torch.cat((above, below, slope, least))
