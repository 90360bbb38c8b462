"""Mixture of experts: a weighted sum of a few of many gated MLPs per token (Mixtral, arXiv:2401.04088, §2.1).

The functions here are the torch specification, for any device. Each rounding step follows transformers' order. For
equal probabilities the expert with the lower index comes first, so that all devices choose the same experts.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.elementwise.reference import silu_and_mul


def route(logits: torch.Tensor, *, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the experts, then each token's top_k, descending: weights [T, top_k] fp32, experts [T, top_k] int64.

    logits: [T, num_experts]. renormalize: a token's weights are divided by their sum.
    """
    probabilities, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = probabilities[:, :top_k]
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), experts[:, :top_k]


def run_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Compute each token's experts. x: [T, H]; gate_up: [E, 2 * I, H]; down: [E, H, I]; experts: [T, top_k].

    Returns [T, top_k, H] of x's dtype. Waits for the device unless it is the CPU; the Triton twin does not.
    """
    out = x.new_empty(*experts.shape, x.shape[1])
    for expert in experts.unique():
        tokens, places = torch.where(experts == expert)
        inner = silu_and_mul(functional.linear(x[tokens], gate_up[expert]))
        out[tokens, places] = functional.linear(inner, down[expert])
    return out


def fused_moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    top_k: int,
    renormalize: bool,
    round_weights: bool,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Route each token and sum its experts by their weights: [T, H] of x's dtype, which may be fp32, bf16 or fp16.

    x, gate_up, down: as for run_experts. logits: [T, E], plus one column if `shared` is given. round_weights: round to
    x's dtype before use. shared: [T, H], output of the shared expert, added times the sigmoid of that last column.
    """
    num_experts = gate_up.shape[0]
    weights, experts = route(logits[:, :num_experts], top_k=top_k, renormalize=renormalize)
    if round_weights:
        weights = weights.to(x.dtype)
    out = run_experts(x, gate_up, down, experts)
    mixed = (out * weights[..., None]).sum(1).to(x.dtype)
    return mixed if shared is None else mixed + logits[:, num_experts:].sigmoid() * shared
