"""Row-wise ops between the GEMMs, and writes to the KV pool: the torch specification.

RMS and layer norm, rotary positions, activations with and without a gate; write_kv stores a step's keys and values in
the paged pool, in their own dtype, in fp8 or in int8; norm_rope_write_kv does it after norms and rotation.
Any device. Each rounding step follows transformers' order, so that bf16 logits agree with the reference implementation,
not only fp32 ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

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


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise the last dimension by its mean and variance (arXiv:1607.06450, eq. 4).

    x: [..., D]; weight, bias: [D] fp32; returns x's dtype. fp32 inside, rounded once.
    """
    centred = x.float() - x.float().mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream, then normalise the sum: (normed, new_residual). As add_rms_norm."""
    new_residual = x + residual
    return layer_norm(new_residual, weight, bias, eps), new_residual


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    is_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys to their positions (RoFormer, arXiv:2104.09864).

    Pair i of a head is dimensions i and i + rotary_dim / 2 ("neox" layout); is_interleaved: 2i and 2i + 1 ("GPT-J").

    q: [T, H, D]; k: [T, Hkv, D]; positions: [T] int64; cos_sin_cache: [max_positions, rotary_dim], the first half of
    each row cosines, the second half sines, in q's dtype or fp32: products and sums are rounded to it (transformers'
    OLMo-2 turns in fp32, its Llama does not). Dimensions past rotary_dim pass unchanged. Returns new tensors.
    """
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, rotary_dim / 2]
    rotate = _rotate_interleaved if is_interleaved else _rotate
    return rotate(q, cos, sin), rotate(k, cos, sin)


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


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Return relu(x)², rounded after the square (Primer, arXiv:2109.08668, §4.1). x: [T, I]."""
    return functional.relu(x).square()


def xielu(x: torch.Tensor, constants: torch.Tensor) -> torch.Tensor:
    """Return xIELU (arXiv:2411.13010, eq. 9): above 0 a·x² + b·x, else c·(expm1(min(x, e)) − x) + b·x. x: [T, I].

    constants: [4], (a, c, b, e) of x's dtype; each product and sum is rounded to it, as in transformers.
    """
    above, below, slope, least = constants.unbind()
    negative = (torch.expm1(torch.minimum(x, least)) - x) * below + slope * x
    return torch.where(x > 0, above * x * x + slope * x, negative)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1).to(x.dtype)


def _rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    x1, x2 = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1).to(x.dtype)


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8 = torch.int8
INT8_MAX = 127.0
INT8_SCALE = torch.float32  # dtype of the scales beside the numbers of an int8 pool
INT8_LEAST = 2.0**-100  # a head whose numbers are all smaller is stored as zeros: 127 / amax would overflow


@dataclass(frozen=True)
class KVScales:
    """Scales of one layer's pool: a stored number times its scale is the value. k and v are of one of these kinds.

    A number, constant for the layer: of an FP8 pool; 1 in a pool of the model's dtype.
    [num_kv_heads] fp32, a constant for each head: of an FP8 pool.
    [num_blocks, block_size, num_kv_heads] fp32, of any strides: of an INT8 pool, one for each token and head. They lie
    in the pool beside the numbers and are written with them.
    """

    k: float | torch.Tensor = 1.0
    v: float | torch.Tensor = 1.0

    def for_kernel(self) -> tuple[float, float, tuple[torch.Tensor | int | None, ...]]:
        """Return the constants of the layer, and what a kernel takes of other scales: k, v and their three strides.

        The strides are those of blocks, slots and heads; all five are None for constants of the layer, the first two
        strides for those of heads.
        """
        k, v = self.k, self.v
        if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
            assert k.stride() == v.stride(), "scales of keys and of values lie alike"
            return 1.0, 1.0, (k, v, None, None, k.stride(0)) if k.ndim == 1 else (k, v, *k.stride())
        assert isinstance(k, float), "scales of keys and of values are of one kind"
        assert isinstance(v, float), "scales of keys and of values are of one kind"
        return k, v, (None, None, None, None, None)


UNSCALED = KVScales()


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: KVScales = UNSCALED,
) -> None:
    """Store each token's key and value at its slot (block_id * block_size + offset), in place.

    k, v: [T, num_kv_heads, head_dim], of the caches' dtype unless that is FP8 or INT8; k_cache, v_cache: [num_blocks,
    block_size, num_kv_heads, head_dim], of any strides; slot_mapping: [T] int64, every entry a real slot. FP8 holds
    k / scales.k, rounded to nearest even and clamped to ±448; INT8 what to_int8 makes of k, and its scales go to the
    same slots of scales.k, in place. Padding tokens share the scratch block's slots: which of them is kept there is
    undefined, and nothing reads it.
    """
    store_tokens(k, k_cache, slot_mapping, scales.k)
    store_tokens(v, v_cache, slot_mapping, scales.v)


def store_tokens(
    x: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, scale: float | torch.Tensor = 1.0
) -> None:
    """Store keys, or values, in one cache, and the scales of an INT8 one; see write_kv."""
    if cache.dtype == INT8:
        assert isinstance(scale, torch.Tensor), "an int8 pool has scales for each token and head"
        x, scales = to_int8(x)
        _store(scales, scale, slot_mapping)
    elif cache.dtype == FP8:  # torch copies its bytes by index on every device, its numbers not on the CPU
        cache, x = cache.view(torch.uint8), to_fp8(x, scale).view(torch.uint8)
    _store(x, cache, slot_mapping)


def _store(x: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Copy x, [T, ...], to its slots of pool, [num_blocks, block_size, ...]."""
    if pool.is_contiguous():
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slot_mapping, x)
    else:
        pool[slot_mapping // pool.shape[1], slot_mapping % pool.shape[1]] = x


def to_fp8(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Convert x / scale to FP8; scale: of all, or [num_kv_heads] fp32 of x's last dimension but one.

    Clamped first: outside its range torch's conversion may give NaN.
    """
    inverse = scale.reciprocal()[:, None] if isinstance(scale, torch.Tensor) else 1.0 / scale
    return (x.float() * inverse).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each head of each token by itself: (numbers of x's shape, scales [..., num_kv_heads] fp32).

    x: [..., num_kv_heads, head_dim]. Symmetric: a scale is the largest magnitude / 127, and numbers are rounded to
    nearest even, so the result depends on nothing else in the step. A head with a number that is not finite gets zeros
    and a scale that is not finite, so what attention reads is NaN.
    """
    x_fp32 = x.float()
    amax = x_fp32.abs().amax(-1, keepdim=True)
    most = torch.full_like(amax, INT8_MAX)  # a tensor: with a Python number torch multiplies by a rounded reciprocal
    inverse = torch.where(amax >= INT8_LEAST, most / amax, 0.0)
    numbers = (x_fp32 * inverse).nan_to_num(0.0).round().to(INT8)
    return numbers, (amax / most).squeeze(-1)


def from_int8(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of numbers [..., num_kv_heads, head_dim] with scales [..., num_kv_heads] fp32, in dtype."""
    return (numbers * scales[..., None]).to(dtype)


@functools.cache
def _fp8_values() -> torch.Tensor:
    """Return the value of each byte, [256] fp32. Made when it is used: see engine.startup.load._prepare_cpu."""
    return torch.arange(256, dtype=torch.uint8).view(FP8).float()


def from_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert x, which is contiguous, to another dtype: all served dtypes represent FP8 exactly."""
    if x.device.type != "cpu":
        return x.to(dtype)
    # torch's conversion is a scalar loop on the CPU: a table is six times as fast
    return _fp8_values().to(dtype).index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)


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
    """Split qkv, normalise each head of q and k (unless the weights are None), rotate them, store k and v.

    is_interleaved: see apply_rope. norms_rotated: the heads are normalised after the rotation instead of before it.

    qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]; weights: [head_dim], both of one dtype (see rms_norm);
    positions, slot_mapping: [T] int64; cos_sin_cache: [max_positions, rotary_dim]; caches, kv_scales: as write_kv,
    which writes them. Returns q [T, H, D].
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None and not norms_rotated:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = apply_rope(q, k, positions, cos_sin_cache, is_interleaved=is_interleaved)
    if q_weight is not None and k_weight is not None and norms_rotated:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    write_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    return q


def norm_rope_write_latent(
    latent: torch.Tensor,
    q_rope: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float = 1.0,
    is_interleaved: bool = False,
) -> torch.Tensor:
    """Do what latent attention does between its projections and the absorbed queries (MLA; arXiv:2405.04434, §2.1).

    Normalise the latents, rotate the part of keys behind them and that of queries, store latents and keys.

    latent: [T, rank + rope_dim]; q_rope: [T, H, rope_dim]; both of any strides with a dense last dimension. weight:
    [rank], see rms_norm; cos_sin_cache, is_interleaved: see apply_rope; rope_dim is all of its rotary_dim. cache:
    [num_blocks, block_size, 1, rank + rope_dim], written as write_kv writes keys; scale: of an FP8 cache. Returns the
    rotated queries [T, H, rope_dim].
    """
    rank = weight.shape[0]
    q_rope, k_rope = apply_rope(q_rope, latent[:, None, rank:], positions, cos_sin_cache, is_interleaved=is_interleaved)
    keys = torch.cat((rms_norm(latent[:, None, :rank], weight, eps), k_rope), dim=-1)
    store_tokens(keys, cache, slot_mapping, scale)
    return q_rope
