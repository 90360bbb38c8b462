"""Mixture of experts: a weighted sum of a few of many gated MLPs per token (Mixtral, arXiv:2401.04088, §2.1).

The functions here are the torch specification, for any device. Each rounding step follows transformers' order. For
equal probabilities the expert with the lower index comes first, so that all devices choose the same experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from kernels.elementwise.reference import add_rms_norm, gelu_tanh_and_mul, relu_squared, silu_and_mul
from kernels.linear.reference import quantize_groups
from kernels.linear.rounding import RoundedRows, Rounding, round_rows
from kernels.moe.storage import ExpertMatrix, dense_matrix


@dataclass(frozen=True)
class Gate:
    """How an expert joins the halves of its first product, gate and up.

    "silu", "gelu_tanh": activation(gate) * up. "clamped": (up + 1) * gate * sigmoid(alpha * gate), gate at most limit
    and up from -limit to limit (gpt-oss, arXiv:2508.10925). "relu2": there is no gate, and relu(up)² is all.
    """

    kind: Literal["silu", "gelu_tanh", "clamped", "relu2"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def num_halves(self) -> int:
        """The parts of the first product: gate and up, or up alone."""
        return 1 if self.kind == "relu2" else 2


SILU = Gate()
FP8_GROUP = 128  # neighbouring inputs of a token that share a scale


@dataclass(frozen=True)
class ExpertBiases:
    """The biases of an expert's products."""

    # [E, 2 * I], gates first, or [E, I] without gates, and [E, H]
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Choice:
    """How logits become weights of experts, and the scores by which experts are chosen: weights plus bias.

    With groups of neighbouring experts only those of a token's best groups are open: a group is as good as its
    num_best_of_group best scores together (DeepSeek-V3, arXiv:2412.19437, §2.1.2; DeepSeek-V2's has one best). Of equal
    groups the first comes first.
    """

    kind: Literal["softmax", "sigmoid"]
    bias: torch.Tensor | None = None  # [num_experts] fp32, of the choice alone
    num_groups: int = 1  # divides num_experts
    num_groups_per_tok: int = 1
    num_best_of_group: int = 2


@dataclass(frozen=True)
class ExpertSum:
    """The outputs of each token's experts, whose sum is left to the norm after it; of T tokens of width H."""

    # [T * top_k, H], token by token; undefined for experts that are not here
    outputs: torch.Tensor
    # [T, top_k], 0 for experts that are not here
    weights: torch.Tensor
    # [T, top_k], -1 or not below E: not here, if has_absent
    experts: torch.Tensor
    has_absent: bool
    # As of fused_moe, and the gate before its sigmoid, [T]
    shared: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None


def sum_experts(late: ExpertSum) -> torch.Tensor:
    """Return the sum, [T, H], of outputs' dtype."""
    outputs, dtype = late.outputs.unflatten(0, late.weights.shape), late.outputs.dtype
    weighed = outputs * late.weights[..., None]
    if late.has_absent:
        weighed = weighed.masked_fill((late.experts < 0)[..., None], 0.0)
    mixed = weighed.sum(1).to(dtype)
    if late.shared is None or late.shared_gate is None:
        return mixed
    return mixed + late.shared_gate[:, None].sigmoid() * late.shared


def sum_experts_add_rms_norm(
    late: ExpertSum, residual: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding | None
) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
    """Compute elementwise.add_rms_norm of the sum, and round the normed rows as rounding says, None: not at all.

    residual: [T, H]; weight: [H]; returns (normed, new residual).
    """
    normed, new_residual = add_rms_norm(sum_experts(late), residual, weight, eps)
    return (normed if rounding is None else round_rows(normed, rounding)), new_residual


def choose(logits: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores, -inf for experts of closed groups, and weights of all experts. logits: [T, num_experts].

    Weights are rounded to the dtype of logits, as in transformers. A token with a NaN has a NaN among its choice.
    """
    weights = logits.sigmoid() if choice.kind == "sigmoid" else logits.softmax(-1)
    if choice.bias is None:
        weights = weights.float()
    scores = weights if choice.bias is None else weights + choice.bias
    if choice.num_groups == 1:
        return scores, weights
    grouped = scores.unflatten(-1, (choice.num_groups, -1))
    totals = grouped.topk(choice.num_best_of_group, dim=-1).values.sum(-1)
    best = totals.sort(dim=-1, descending=True, stable=True).indices[:, : choice.num_groups_per_tok]
    is_closed = torch.ones_like(totals, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(is_closed[..., None], float("-inf")).flatten(1), weights


def route(
    logits: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool,
    given: torch.Tensor | None = None,
    floor: float = 0.0,
    added: float = 0.0,
    factor: float = 1.0,
    expert_scales: torch.Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the experts, then each token's top_k, descending: weights [T, top_k] fp32, experts [T, top_k] int64.

    logits: [T, num_experts]. renormalize: a token's weights are divided by the larger of floor and their own sum, plus
    `added`; then they are multiplied by factor. given: [T, num_experts] fp32, the weights of the experts if they are
    chosen; then there is no softmax and the top_k largest logits are chosen, of which at least top_k are above -inf.
    expert_scales: [num_experts] fp32, multiply the weights last. choice: makes logits and `given` of the logits.
    """
    if choice is not None:
        assert given is None
        logits, given = choose(logits, choice)
    scores = logits.float().softmax(-1) if given is None else logits.float()
    ordered, experts = scores.sort(dim=-1, descending=True, stable=True)
    experts = experts[:, :top_k]
    weights = ordered[:, :top_k] if given is None else given.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(floor).add(added)
    weights = weights * factor
    return (weights if expert_scales is None else weights * expert_scales[experts]), experts


def gate_and_mul(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Join the halves of x, gates first. x: [N, 2 * I], without a gate [N, I]; returns [N, I]."""
    if gate.kind == "relu2":
        return relu_squared(x)
    if gate.kind != "clamped":
        return silu_and_mul(x) if gate.kind == "silu" else gelu_tanh_and_mul(x)
    gates, ups = x.chunk(2, dim=-1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    return (ups + 1) * (gates * (gates * gate.alpha).sigmoid())


def run_experts(
    x: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    experts: torch.Tensor,
    gate: Gate = SILU,
    biases: ExpertBiases | None = None,
    rounding: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute each token's experts. x: [T, H]; gate_up: [E, 2 * I, H], without a gate [E, I, H].

    down: [E, H, I]; experts: [T, top_k], indices below E; others are no experts here, and their outputs are 0.
    Returns [T, top_k, H] of x's dtype, to which packed matrices are dequantised. rounding: applied to both products'
    inputs, [rows, K]; the products are then those of what it returns, with matrices of that dtype.
    Waits for the device unless it is the CPU; the Triton twin does not.
    """
    out = x.new_zeros(*experts.shape, x.shape[1])
    for expert in experts.unique():
        if not 0 <= expert < gate_up.shape[0]:
            continue
        tokens, places = torch.where(experts == expert)
        up_bias, down_bias = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        inner = gate_and_mul(_linear(x[tokens], gate_up, expert, up_bias, rounding), gate)
        out[tokens, places] = _linear(inner, down, expert, down_bias, rounding)
    return out


def _linear(
    x: torch.Tensor,
    matrix: ExpertMatrix,
    expert: torch.Tensor,
    bias: torch.Tensor | None,
    rounding: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Return one product in x's dtype."""
    rounded = x if rounding is None else rounding(x)
    bias = bias if bias is None else bias.to(rounded.dtype)
    return functional.linear(rounded, dense_matrix(matrix, expert, rounded.dtype), bias).to(x.dtype)


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round each row to e4m3 with a scale for each 128 neighbours (DeepSeek-V3, arXiv:2412.19437, §3.3): fp32."""
    values, scales = quantize_groups(x, FP8_GROUP)
    return values.float() * scales.repeat_interleave(FP8_GROUP, 1)[:, : x.shape[1]]


def fused_moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    *,
    top_k: int,
    renormalize: bool,
    round_weights: bool,
    shared: torch.Tensor | None = None,
    gate: Gate = SILU,
    biases: ExpertBiases | None = None,
    expert_scales: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
    floor: float = 0.0,
    added: float = 0.0,
    factor: float = 1.0,
    first_expert: int = 0,
    choice: Choice | None = None,
    rounding: Callable[[torch.Tensor], torch.Tensor] | None = None,
    is_late: bool = False,
) -> torch.Tensor | ExpertSum:
    """Route each token and sum its experts by their weights: [T, H] of x's dtype, which may be fp32, bf16 or fp16.

    x, gate_up, down: as for run_experts. logits: [T, E], plus one column if `shared` is given. round_weights: round to
    x's dtype before use. shared: [T, H], output of the shared expert, added times the sigmoid of that last column.
    given, floor, added, factor, expert_scales, choice: see route. biases: of x's dtype. first_expert: gate_up, down and
    biases have a range of the E experts, which begins there; a token's other experts are left out of its sum. rounding:
    see run_experts; the twin has round_to_fp8 in place of none with an Fp8Config, which it chooses for many tokens.
    is_late: return an ExpertSum; the twin does where the sum is a launch of its own.
    """
    num_experts = logits.shape[1] - (shared is not None)
    weights, experts = route(
        logits[:, :num_experts],
        top_k=top_k,
        renormalize=renormalize,
        given=given,
        floor=floor,
        added=added,
        factor=factor,
        expert_scales=expert_scales,
        choice=choice,
    )
    if round_weights:
        weights = weights.to(x.dtype)
    experts = experts - first_expert
    is_absent = (experts < 0) | (experts >= gate_up.shape[0])
    weights = weights.masked_fill(is_absent, 0.0)
    out = run_experts(x, gate_up, down, experts, gate, biases, rounding)
    late = ExpertSum(
        out.flatten(0, 1), weights, experts.masked_fill(is_absent, -1), has_absent=gate_up.shape[0] < num_experts,
        shared=shared, shared_gate=None if shared is None else logits[:, num_experts],
    )  # fmt: skip
    return late if is_late else sum_experts(late)
