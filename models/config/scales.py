"""Scales: the constants that some models multiply by, or cap with, where others have nothing."""

from __future__ import annotations

from dataclasses import dataclass

from models.fields import Fields
from models.registry import Architecture


@dataclass(frozen=True)
class Scales:
    """Each is 1 (a cap: 0) in a model that has no such thing."""

    attention: float  # of the products of queries and keys
    embedding: float = 1.0
    residual: float = 1.0  # of what attention and MLP add to the residual stream
    logits_divisor: float = 1.0
    attention_softcap: float = 0.0  # cap * tanh(x / cap), after the scale
    logits_softcap: float = 0.0


def parse_scales(config: Fields, architecture: Architecture, *, hidden_size: int, head_dim: int) -> Scales:
    """Read the constants that this architecture has. Raises ModelError."""
    kind = architecture.scales
    if kind == "granite":
        return Scales(
            attention=config.positive("attention_multiplier", default=1.0),
            embedding=config.positive("embedding_multiplier", default=1.0),
            residual=config.positive("residual_multiplier", default=1.0),
            logits_divisor=config.positive("logits_scaling", default=1.0),
        )
    if kind == "gemma":
        return Scales(attention=head_dim**-0.5, embedding=hidden_size**0.5)
    if kind in ("gemma2", "gemma3"):
        return Scales(
            attention=config.positive("query_pre_attn_scalar") ** -0.5,
            embedding=hidden_size**0.5,
            # transformers' Gemma 3 has the field too, and applies it nowhere
            attention_softcap=config.number("attn_logit_softcapping", default=0.0) if kind == "gemma2" else 0.0,
            logits_softcap=config.number("final_logit_softcapping", default=0.0),
        )
    return Scales(attention=head_dim**-0.5)
