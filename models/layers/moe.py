"""SparseMLP: a mixture of experts in place of the MLP, and the tensor names of its weights in checkpoints.

Each expert's intermediate dimension is split over ranks as in a dense MLP, and one all-reduce follows the sum of the
experts' outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kernels.ops import fused_moe
from models.config.layers import ExpertsConfig
from models.config.model_config import ModelConfig
from models.layers.linear import ColumnLinear
from models.layers.mlp import GatedMLP
from models.parallel import LayerOutput, TensorParallel
from models.quantization.linear_method import LinearMethod, LinearPart
from models.quantization.schemes import Unquantized
from models.weights.weights import Weights


@dataclass(frozen=True)
class ExpertNames:
    """The names of an expert's matrices in published checkpoints."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class SparseMLP(nn.Module):
    """A router, its experts and, if the config has one, an expert that every token uses.

    w: the block that holds `gate` and `experts`. method: for the shared expert; the routed experts are unquantized.
    """

    def __init__(
        self,
        config: ModelConfig,
        w: Weights,
        tp: TensorParallel,
        method: LinearMethod,
        names: ExpertNames = ExpertNames(),
    ) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None
        self.experts = experts
        self.tp = tp
        # Replicated, so that all ranks choose the same experts
        parts = [LinearPart("gate", experts.num_experts, config.hidden_size, dim=0, rank=0, size=1)]
        self.shared_expert: nn.Module | None = None
        if experts.shared_intermediate_size > 0:
            parts.append(LinearPart("shared_expert_gate", 1, config.hidden_size, dim=0, rank=0, size=1))
            self.shared_expert = GatedMLP(
                config,
                w / "shared_expert",
                tp,
                method,
                intermediate_size=experts.shared_intermediate_size,
                is_partial=True,
            )
        self.router = ColumnLinear(w, parts, has_bias=False, method=Unquantized())
        self.gate_up, self.down = _load_experts(w / "experts", experts, config.hidden_size, tp, names)

    def forward(self, hidden: torch.Tensor) -> LayerOutput:
        """hidden: [T, hidden_size] → [T, hidden_size]."""
        mixed = fused_moe(
            hidden,
            self.router(hidden),
            self.gate_up,
            self.down,
            top_k=self.experts.num_experts_per_tok,
            renormalize=self.experts.norm_topk_prob,
            round_weights=self.experts.rounds_weights,
            shared=None if self.shared_expert is None else self.shared_expert(hidden),
        )
        return self.tp.sum_late(mixed)


def _load_experts(
    w: Weights, experts: ExpertsConfig, hidden_size: int, tp: TensorParallel, names: ExpertNames
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read this rank's gate_up [E, 2 * I, hidden_size], gates first, and down [E, hidden_size, I].

    The checkpoint has either one tensor per matrix and expert, the published form, or two tensors for all experts, the
    form that transformers 5 uses in memory and saves if told not to convert back.
    """
    count, size = experts.num_experts, experts.intermediate_size
    width = size // tp.size
    gate_up = torch.empty(count, 2 * width, hidden_size, dtype=w.dtype, device=w.device)
    down = torch.empty(count, hidden_size, width, dtype=w.dtype, device=w.device)
    if w.shape_of("gate_up_proj") is not None:
        start, shape = tp.rank * width, (count, 2 * size, hidden_size)
        gate_up[:, :width] = w.slice("gate_up_proj", shape, dim=1, start=start, stop=start + width)
        gate_up[:, width:] = w.slice("gate_up_proj", shape, dim=1, start=size + start, stop=size + start + width)
        down.copy_(w.shard("down_proj", (count, hidden_size, size), dim=2, rank=tp.rank, size=tp.size))
        return gate_up, down
    for expert in range(count):
        inner = w / str(expert)
        for name, rows in ((names.gate, slice(0, width)), (names.up, slice(width, None))):
            gate_up[expert, rows] = (inner / name).shard(
                "weight", (size, hidden_size), dim=0, rank=tp.rank, size=tp.size
            )
        down[expert] = (inner / names.down).shard("weight", (hidden_size, size), dim=1, rank=tp.rank, size=tp.size)
    return gate_up, down
