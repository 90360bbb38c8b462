"""Row-wise ops between the GEMMs: RMS norm, rotary positions, gated SiLU and GELU.

The functions here are the specification: plain torch, any device. Their rounding follows transformers' order step by
step, so that bf16 logits agree with the reference implementation and not only fp32 ones.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension by its root mean square (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

    x: [..., D]; weight: [D], of x's dtype or fp32; returns x's dtype. fp32 inside. A weight of x's dtype is applied
    after rounding to it, as transformers' Llama does; one in fp32 before the only rounding, as its Gemma and OLMo-2 do.
    """
    x_fp32 = x.float()
    inverse_rms = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (weight * (x_fp32 * inverse_rms).to(weight.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream, then normalise the sum: (normed, new_residual).

    x, residual: [..., D], the sum rounded to their dtype; weight: as rms_norm's. Neither input is written.
    """
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys to their positions (RoFormer, arXiv:2104.09864, in the half-split "neox" layout).

    q: [T, H, D]; k: [T, Hkv, D]; positions: [T] int64; cos_sin_cache: [max_positions, rotary_dim], the first half of
    each row cosines, the second half sines, in q's dtype or fp32: products and sums are rounded to it (transformers'
    OLMo-2 turns in fp32, its Llama does not). Dimensions past rotary_dim pass unchanged. Returns new tensors.
    """
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, rotary_dim / 2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate: silu(x[:, :I]) * x[:, I:] (SwiGLU, arXiv:2002.05202). x: [T, 2 * I]; returns [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate: gelu(x[:, :I]) * x[:, I:] (GEGLU, arXiv:2002.05202), by the tanh approximation (arXiv:1606.08415, §2).

    x: [T, 2 * I]; returns [T, I].
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1).to(x.dtype)
