"""LateNorm: a row whose norm the product after it computes; and gated products. The torch specification.

With few rows a norm, or a gated activation, takes as long as its launch. The product behind a norm can add the row to
the residual stream and norm it (kernels/linear/triton_row.py), and the product of gates and ups can apply the
activation (kernels/linear/triton_gemv.py), each for one kernel less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from kernels.elementwise import reference as elementwise

GateKind = Literal["", "silu", "gelu_tanh"]


@dataclass(frozen=True)
class LateNorm:
    """What elementwise.add_rms_norm is called with, and where its results go once a product has run."""

    # [1, K]
    x: torch.Tensor
    residual: torch.Tensor
    # [K]
    weight: torch.Tensor
    eps: float
    # [1, K], contiguous: undefined until the product has run
    new_residual: torch.Tensor


def normed_linear(
    late: LateNorm,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gate: GateKind = "",
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of the normed row and w.T, plus bias; fill late.new_residual and, if given, normed, [1, K].

    w: [N, K]; bias: [N] or None; returns [1, N]. gate: the activation behind that sum is applied too: [1, N / 2].
    """
    row, new_residual = elementwise.add_rms_norm(late.x, late.residual, late.weight, late.eps)
    late.new_residual.copy_(new_residual)
    if normed is not None:
        normed.copy_(row)
    product = functional.linear(row, w, bias)
    return product if gate == "" else _gate_and_mul(product, is_gelu=gate == "gelu_tanh")


def gated_linear(x: torch.Tensor, w: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """Compute elementwise.silu_and_mul, or gelu_tanh_and_mul, of x @ w.T. x: [T, K]; w: [2 * I, K]; returns [T, I]."""
    return _gate_and_mul(functional.linear(x, w), is_gelu=is_gelu)


def _gate_and_mul(product: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    return elementwise.gelu_tanh_and_mul(product) if is_gelu else elementwise.silu_and_mul(product)
