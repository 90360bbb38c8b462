"""Around the gated delta rule: its gates, and the gated norm of its outputs. The torch specifications. Any device."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

GateActivation = Literal["silu", "sigmoid"]


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, *, max_beta: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what gated_delta_rule takes: g = -exp(a_log) * softplus(a + dt_bias), and beta = max_beta * sigmoid(b).

    a: [T, heads], or [T, heads, d_k] with a gate for each key dimension; b: [T, heads]; both may be slices of wider
    rows. a_log: [heads]; dt_bias: one token's shape of a, or flat. g has a's shape, beta b's; both are contiguous
    float32, computed in float32. max_beta: 2 where the layer allows negative eigenvalues.
    """
    decay = a_log.float().exp()
    if a.dim() == 3:
        decay = decay[:, None]
    g = -decay * functional.softplus(a.float() + dt_bias.float().view(a.shape[1:]))
    return g.contiguous(), (max_beta * b.float().sigmoid()).contiguous()


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, activation: GateActivation = "silu"
) -> torch.Tensor:
    """Normalise each head by its root mean square, scale it by the weight, then multiply by the activated gate.

    x, gate: [T, heads, d_v], may be slices of wider rows; weight: [d_v]. Computed in float32, rounded once. Returns
    [T, heads, d_v], contiguous, in x's dtype.
    """
    x_fp32, gate_fp32 = x.float(), gate.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps) * weight.float()
    activated = functional.silu(gate_fp32) if activation == "silu" else gate_fp32.sigmoid()
    return (normed * activated).to(x.dtype, memory_format=torch.contiguous_format)
