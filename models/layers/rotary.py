"""Rotary position tables: cos and sin of every position, one table for all layers with equal settings.

The context extensions change only the frequencies (yarn and longrope also the magnitude);
kernels.elementwise.reference.apply_rope is the same for all. A row depends only on its position, never on the request's
length: requests that share a prefix share its keys, and the way a prompt is cut into steps makes no difference.
"""

from __future__ import annotations

import math

import torch

from models.config.model_config import ModelConfig
from models.config.rope import RopeConfig
from models.errors import ModelError


def make_cos_sin_caches(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, rounded_to: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return one table per layer, [max_context_len, rotary_dim], cosines, then sines; equal ropes share one tensor.

    Computed in fp32 on the CPU, so that every device has the same table, then rounded to dtype as transformers does.
    rounded_to: before that to this dtype. On the meta device only the first position is computed.
    """
    is_meta = device.type == "meta"
    keys = list(zip(config.ropes, (0 if cache is None else cache.rotated_dim for cache in config.caches), strict=True))
    tables = {
        (rope, head_dim): _make_table(rope, head_dim, 1 if is_meta else config.max_context_len)
        .to(rounded_to or dtype)
        .to(device, dtype)
        for rope, head_dim in dict.fromkeys(keys)
    }
    if is_meta:
        tables = {
            key: table if key[0] is None else table.new_empty(config.max_context_len, table.shape[1])
            for key, table in tables.items()
        }
    # A layer without positions has the rotation by angle 0; one row serves all positions
    return [tables[key] if key[0] is not None else tables[key].expand(config.max_context_len, -1) for key in keys]


def make_query_factors(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the factor of the queries at each position, [max_context_len, 1, 1]; None: it is 1 everywhere.

    transformers, modeling_ministral3, get_llama_4_attn_scale: fp32, rounded to dtype before the product. Llama 4's
    own is not rounded.
    """
    constants = config.multipliers
    growth, length, offset = constants.query_growth, constants.query_growth_length, constants.query_growth_offset
    if growth == 0 or config.max_context_len + offset <= length:
        return None
    positions = torch.arange(config.max_context_len, device="meta" if device.type == "meta" else "cpu") + offset
    factors = 1 + growth * torch.log(1 + torch.floor(positions / length))
    return factors.to(device, dtype if constants.rounds_query_growth else torch.float32)[:, None, None]


def inverse_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return the radians per position of each rotated pair: [rotary_dim / 2] fp32.

    longrope's depend on num_positions, the tokens of the longest request; dynamic's hold up to the original length.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    if rope.type == "proportional":
        return _proportional(rope, head_dim)
    powers = rope.theta ** _exponents(rotary_dim)
    if rope.type == "longrope":
        return _longrope(powers, rope.long_factors if rope.is_long(num_positions) else rope.short_factors)
    frequencies = 1.0 / powers
    if rope.type == "linear":  # arXiv:2306.15595, eq. 4
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, rotary_dim)
    return frequencies


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor on cos and sin; 1 for most types.

    yarn: attention temperature (arXiv:2309.00071, eq. 22); mscale and mscale_all_dim: DeepSeek's variant (transformers,
    _compute_yarn_parameters). longrope: arXiv:2402.13753, appendix, as in microsoft/LongRoPE.
    """
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        if rope.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
    if rope.mscale > 0 and rope.mscale_all_dim > 0:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def latent_score_factor(rope: RopeConfig) -> float:
    """Return the factor on the scores of latent attention beside head_dim ** -0.5 (transformers, yarn_apply_mscale)."""
    if rope.type == "default" or rope.mscale_all_dim == 0:
        return 1.0
    return _yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def _make_table(rope: RopeConfig | None, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return [num_positions, rotary_dim] fp32; without rope [1, head_dim], the rotation by angle 0."""
    if rope is None:
        return torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=-1)
    try:
        table = _make_turns(rope, head_dim, num_positions)
    except ArithmeticError as error:
        raise ModelError(f"{rope} cannot be computed: {error}") from error
    if not bool(table.isfinite().all()):
        raise ModelError(f"{rope} gives angles that are not finite")
    return table


def _make_turns(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, num_positions))
    original = rope.original_max_position_embeddings
    if rope.type == "dynamic" and num_positions > original:
        angles[original:] = positions[original:, None] * _dynamic(rope, head_dim, positions[original:] + 1)
    factor = rope.long_mscale if num_positions > original else rope.short_mscale
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * (attention_factor(rope) if factor is None else factor)


def _exponents(rotary_dim: int) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim


def _dynamic(rope: RopeConfig, head_dim: int, lengths: torch.Tensor) -> torch.Tensor:
    """NTK-aware scaling whose base grows with the length (transformers, _compute_dynamic_ntk_parameters).

    lengths: [n], each beyond the original length; returns [n, rotary_dim / 2]. Each token uses the frequencies of the
    length that ends with it, as transformers does while decoding. transformers rotates a longer prompt with the
    frequencies of its whole length, which would make keys depend on later tokens.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    growth = rope.factor * lengths / rope.original_max_position_embeddings - (rope.factor - 1)
    theta = rope.theta * growth ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / theta[:, None] ** _exponents(rotary_dim)


def _longrope(powers: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
    """LongRoPE (arXiv:2402.13753, eq. 3): each pair's wavelength is multiplied by a searched factor.

    transformers uses the short factors while a sequence is short and recomputes it when it grows beyond them; here the
    longest request that is served decides for all requests.
    """
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)


def _proportional(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Gemma 4: the first pairs have the frequencies of the whole head, the others never turn.

    Source: transformers, _compute_proportional_rope_parameters.
    """
    num_turning = int(rope.partial_rotary_factor * head_dim // 2)
    frequencies = 1.0 / rope.theta ** _exponents(head_dim) / rope.factor
    frequencies[num_turning:] = 0.0
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are extended by the factor, short ones kept, those between interpolated.

    Source: meta-llama/llama-models, models/llama3/model.py, apply_scaling.
    """
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    is_long = wavelengths > original / rope.low_freq_factor
    is_short = wavelengths < original / rope.high_freq_factor
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """YaRN "by parts" (arXiv:2309.00071, §3.2): fast pairs are kept, slow pairs interpolated, with a ramp between.

    The ramp runs over the pair's index, not its number of turns, as in the authors' code and transformers.
    """
    low = _yarn_pair_with_turns(rope.beta_fast, rope, rotary_dim)
    high = _yarn_pair_with_turns(rope.beta_slow, rope, rotary_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = (high - low) or 0.001  # the authors' guard against division by zero
    interpolated = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.factor * interpolated + frequencies * (1 - interpolated)


def _yarn_pair_with_turns(num_turns: float, rope: RopeConfig, rotary_dim: int) -> float:
    """Return the (fractional) index of the pair that makes num_turns turns over the original context."""
    wavelength = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
    return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
