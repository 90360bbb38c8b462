"""Router: scores, by which experts are chosen, and the weights of those that are; the tensor names of a mixture.

Sigmoids, softmaxes, biases and groups are part of fused_moe (kernels.moe.reference.Choice), in one launch with top-k;
rarer kinds are plain torch on [T, num_experts] here. Neither waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from kernels.linear.late_norm import LateNorm
from kernels.moe.reference import Choice
from models.config.experts import ExpertsConfig
from models.config.model_config import ModelConfig
from models.layers.linear import ColumnLinear
from models.quantization.linear_method import LinearPart
from models.quantization.schemes import Unquantized
from models.weights.weights import Weights

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExpertNames:
    """The names of a mixture's tensors in published checkpoints, within its block."""

    gate: str = "gate_proj"  # of each expert: experts.N.<name>.weight
    up: str = "up_proj"
    down: str = "down_proj"
    # of all experts: gates, then ups; the names that transformers 5 uses in memory, and saves if told not to convert
    all_gate_up: str = "experts.gate_up_proj"
    all_down: str = "experts.down_proj"
    are_transposed: bool = False  # the tensors of all experts are [E, inputs, outputs]
    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"  # of routing by biased scores
    shared: str = "shared_expert"


_OUTPUTS = 8  # 16 bytes of 16-bit values


class Router(nn.Module):
    """The product with the router's weight, replicated, so that all ranks choose the same experts, and its scores.

    w: the block that holds the router.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, w: Weights, names: ExpertNames) -> None:
        super().__init__()
        self.experts = experts
        self.linear: ColumnLinear | None = None
        self.weight: torch.Tensor | None = None  # [num_experts, hidden_size] fp32
        shape = (experts.num_experts, config.hidden_size)
        if experts.router_precision == "model":
            parts = [LinearPart(names.router, *shape, dim=0, rank=0, size=1)]
            if experts.has_shared_gate:
                parts.append(LinearPart("shared_expert_gate", 1, config.hidden_size, dim=0, rank=0, size=1))
            self.linear = ColumnLinear(w, parts, has_bias=experts.has_bias, method=Unquantized())
            if experts.has_shared_gate and not experts.has_bias:
                _pad_outputs(self.linear)
        elif experts.router_precision == "fp32":
            self.weight = (w / names.router).tensor("weight", shape).float()
        else:
            self.weight = (w / names.router).stored("weight", shape, _FLOATS).float()
        self.bias: torch.Tensor | None = None  # [num_experts] fp32
        if experts.routing in ("softmax_bias", "sigmoid_bias"):
            bias_shape = (experts.num_experts,) if experts.routing == "sigmoid_bias" else (1, experts.num_experts)
            self.bias = w.stored(names.bias, bias_shape, _FLOATS).float().flatten()

    def takes_norm(self, hidden: torch.Tensor) -> bool:
        """Return True if the addition of hidden to the residual stream and its norm are better left to the product."""
        return self.linear is not None and self.linear.takes_norm(hidden)

    def forward(
        self, hidden: torch.Tensor | LateNorm, normed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden: [T, hidden_size] → scores [T, num_experts], and the experts' weights if they are chosen, fp32.

        Weights None: those of choice(). The gate of a shared expert is one more column of the scores. normed: filled
        with the normed rows of a LateNorm.
        """
        num_columns = self.experts.num_experts + self.experts.has_shared_gate
        if isinstance(hidden, LateNorm):
            assert self.linear is not None
            logits = self.linear.normed(hidden, normed=normed)[:, :num_columns]
        elif self.weight is None:
            assert self.linear is not None
            logits = self.linear(hidden)[:, :num_columns]
        else:
            logits = functional.linear(hidden.float(), self.weight)
        if self.experts.routing == "sparsemixer":
            return logits, _sparsemixer(logits, self.experts.jitter).float()
        if self.experts.routing == "chosen_sigmoid":
            return logits, _sigmoids_of_best(logits, self.experts).float()
        return logits, None

    def choice(self) -> Choice | None:
        """Return how the scores of forward() become a choice and weights; None: by their softmax, or by its weights."""
        experts = self.experts
        if experts.routing not in ("softmax", "softmax_bias", "sigmoid", "sigmoid_bias"):
            return None
        if experts.routing == "softmax" and experts.num_groups == 1:
            return None
        return Choice(
            kind="sigmoid" if experts.routing.startswith("sigmoid") else "softmax",
            bias=self.bias,
            num_groups=experts.num_groups,
            num_groups_per_tok=experts.num_groups_per_tok,
            num_best_of_group=experts.num_best_of_group,
        )


def _pad_outputs(linear: ColumnLinear) -> None:
    """Add rows of zeros to a plain matrix: cuBLAS takes rows of whole 16 bytes several times faster than others."""
    if type(linear.method) is not Unquantized:  # adapters have as many outputs as the matrix
        return
    weight = linear.params["weight"]
    if isinstance(weight, torch.Tensor):
        linear.params["weight"] = functional.pad(weight, (0, 0, 0, -weight.shape[0] % _OUTPUTS))


def _sigmoids_of_best(logits: torch.Tensor, experts: ExpertsConfig) -> torch.Tensor:
    """Return sigmoids, divided by the sum of those of the largest logits, rounded as transformers does.

    The choice is by the logits, since sigmoids of several may be rounded to one number (Cohere2MoeTopKRouter).
    """
    weights = logits.sigmoid()
    if not experts.norm_topk_prob:
        return weights
    return weights / logits.topk(experts.num_experts_per_tok, dim=-1).values.sigmoid().sum(-1, keepdim=True)


def _sparsemixer(logits: torch.Tensor, jitter: float) -> torch.Tensor:
    """Return the weights of the two largest logits: SparseMixer at inference (arXiv:2409.12136, as in transformers).

    Each is its softmax among the logits that are not far below it, the second without the first. Others are 0.
    """
    first, first_expert = logits.max(-1, keepdim=True)
    rest = logits.scatter(-1, first_expert, float("-inf"))
    second, second_expert = rest.max(-1, keepdim=True)
    weights = torch.zeros_like(logits)
    for scores, best, expert in ((logits, first, first_expert), (rest, second, second_expert)):
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        shares = scores.masked_fill(is_far, float("-inf")).softmax(-1)
        weights = weights.scatter(-1, expert, shares.gather(-1, expert))
    return weights
