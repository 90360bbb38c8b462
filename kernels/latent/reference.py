"""What latent attention (MLA; arXiv:2405.04434, §2.1) does between its projections and attention over the cache."""

from __future__ import annotations

import torch

from kernels.elementwise.reference import apply_rope, rms_norm, store_tokens


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
    """Normalise the latents, rotate the part of keys behind them and that of queries, store latents and keys.

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
