"""Rotary position tables: cos and sin of every position, one table shared by all layers.

The scalings change only the frequencies (and yarn the magnitude); kernels.elementwise.apply_rope is the same for all.
"""

from __future__ import annotations

import math

import torch

from models.config import ModelConfig
from models.rope_config import RopeConfig


def make_cos_sin_cache(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[max_context_len, head_dim]: head_dim / 2 cosines, then as many sines.

    Computed in fp32 on the CPU, so that every device has the same table, then rounded to dtype as transformers does.
    """
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    angles = torch.outer(torch.arange(config.max_context_len, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(config.rope)
    return table.to(device, dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] fp32: radians per position of each rotated pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: yarn's temperature (arXiv:2309.00071, eq. 22), 1 for the other types.

    mscale and mscale_all_dim are DeepSeek's refinement (transformers, _compute_yarn_parameters).
    """
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale > 0 and rope.mscale_all_dim > 0:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended.

    Source: meta-llama/llama-models, models/llama3/model.py, apply_scaling.
    """
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    is_long = wavelengths > original / rope.low_freq_factor
    is_short = wavelengths < original / rope.high_freq_factor
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN "by parts" (arXiv:2309.00071, §3.2): pairs that turn often are kept, rare ones interpolated, a ramp between.

    The ramp is over the pair's index, not its number of turns, as in the authors' code and transformers.
    """
    low = _yarn_pair_with_turns(rope.beta_fast, rope, head_dim)
    high = _yarn_pair_with_turns(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # the authors' guard against division by zero
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * interpolated + frequencies * (1 - interpolated)


def _yarn_pair_with_turns(num_turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The (fractional) index of the pair that turns num_turns times over the original context."""
    wavelength = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
