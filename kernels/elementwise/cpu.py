"""Row-wise ops of 16-bit models on the CPU: the same results as reference.py with fewer passes, rounded less often.

A decode step of a small batch takes longer to start these ops than to compute them, so what counts is their number.
Sums are in fp32 and each result is rounded once, where the reference rounds every product as transformers does: they
differ by roundings of the dtype. What a function does not take it hands to the reference. Where kernels/native is
loaded, its functions compute the same in one call each.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.elementwise import reference
from kernels.elementwise.reference import UNSCALED, KVScales
from kernels.native import ops as native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See reference.rms_norm."""
    if native.takes_rows(x, weight):
        return native.rms_norm(x, weight, eps)
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm."""
    if x.shape == residual.shape and native.takes_rows(x, residual, weight):
        return native.add_rms_norm(x, residual, weight, eps)
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See reference.silu_and_mul."""
    return native.silu_and_mul(x) if x.ndim == 2 and native.takes_rows(x) else reference.silu_and_mul(x)


def norm_rope_write_kv(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    kv_scales: KVScales = UNSCALED,
    is_interleaved: bool = False,
    norms_rotated: bool = False,
) -> torch.Tensor:
    """See reference.norm_rope_write_kv. Queries and keys are one tensor until they are written."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    if is_interleaved or norms_rotated or cos_sin_cache.shape[1] != head_dim:
        return reference.norm_rope_write_kv(
            qkv, q_weight, k_weight, eps, positions, cos_sin_cache, k_cache, v_cache, slot_mapping,
            num_heads=num_heads, kv_scales=kv_scales, is_interleaved=is_interleaved, norms_rotated=norms_rotated,
        )  # fmt: skip
    if native.takes_rope(qkv, (q_weight, k_weight), cos_sin_cache, k_cache, v_cache):
        return native.norm_rope_write_kv(
            qkv, q_weight, k_weight, eps, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, num_heads=num_heads
        )
    heads = qkv.unflatten(-1, (-1, head_dim))
    num_turned = num_heads + num_kv_heads
    wide = heads[:, :num_turned].float()
    if q_weight is not None and k_weight is not None:
        norms = torch.linalg.vector_norm(wide, 2, -1, True)
        wide.mul_(norms.square_().mul_(1.0 / head_dim).add_(eps).rsqrt_())
        wide[:, :num_heads].mul_(q_weight)
        wide[:, num_heads:].mul_(k_weight)
    turns = cos_sin_cache.index_select(0, positions).float()
    half = head_dim // 2
    cos, sin = turns[:, None, None, :half], turns[:, None, half:]
    pairs = wide.view(-1, num_turned, 2, half)
    first, second = pairs.unbind(2)
    turned = pairs * cos
    turned[:, :, 0].addcmul_(second, sin, value=-1)
    turned[:, :, 1].addcmul_(first, sin)
    rounded = turned.flatten(2).to(qkv.dtype)
    reference.write_kv(rounded[:, num_heads:], heads[:, num_turned:], k_cache, v_cache, slot_mapping, kv_scales)
    return rounded[:, :num_heads]
