"""RopeConfig: the rotary part of a config.json, old spelling (rope_theta, rope_scaling) or new (rope_parameters)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. Fields after `factor` matter only to the types named beside them."""

    theta: float
    type: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: computed from factor and mscale
    mscale: float = 0.0  # yarn; 0: unset
    mscale_all_dim: float = 0.0  # yarn; 0: unset
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn


def parse_rope(raw: Mapping[str, Any], *, where: str, max_position_embeddings: int) -> RopeConfig:
    """Read the rotary fields of a config.json. where: names the config in errors. Raises ModelError."""
    new_style = raw.get("rope_parameters")
    fields = new_style or raw.get("rope_scaling") or {}
    if not isinstance(fields, Mapping):
        raise ModelError(f"{where}: rope_parameters must be an object, found {fields!r}")
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise ModelError(f"{where}: rope_parameters per layer type ({', '.join(fields)}) are not supported")
    rope_type = fields.get("rope_type") or fields.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"{where}: rope type {rope_type!r} is not supported: supported are {', '.join(ROPE_TYPES)}")
    partial = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"{where}: partial_rotary_factor {partial!r} is not supported")
    theta = _number(fields, "rope_theta", where, default=_number(raw, "rope_theta", where, default=10_000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    original = _number(fields, "original_max_position_embeddings", where, default=max_position_embeddings)
    has_own_attention_factor = fields.get("attention_factor") is not None
    return RopeConfig(
        theta=theta,
        type=rope_type,
        # yarn checkpoints may leave the factor out and mean this ratio (transformers, _compute_yarn_parameters)
        factor=_number(fields, "factor", where, default=max_position_embeddings / original),
        original_max_position_embeddings=int(original),
        low_freq_factor=_number(fields, "low_freq_factor", where, default=1.0),
        high_freq_factor=_number(fields, "high_freq_factor", where, default=4.0),
        attention_factor=_number(fields, "attention_factor", where, default=1.0) if has_own_attention_factor else None,
        mscale=_number(fields, "mscale", where, default=0.0),
        mscale_all_dim=_number(fields, "mscale_all_dim", where, default=0.0),
        beta_fast=_number(fields, "beta_fast", where, default=32.0) or 32.0,
        beta_slow=_number(fields, "beta_slow", where, default=1.0) or 1.0,
        truncate=bool(fields.get("truncate", True)),
    )


def _number(fields: Mapping[str, Any], name: str, where: str, *, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ModelError(f"{where}: {name} must be a non-negative number, found {value!r}")
    return float(value)
