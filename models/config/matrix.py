"""Matrix: one projection of a layer, as its config describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Matrix:
    """One projection. In the checkpoint it may be part of a merged matrix."""

    name: str  # full name in the checkpoint: "model.layers.0.self_attn.q_proj", or "….qkv_proj"
    out_features: int
    in_features: int
    shared: Literal["outputs", "inputs"]  # the dimension that is split over ranks
    num_kv_heads: int = 0  # in its outputs: no share is smaller than one; 0: it has none
    is_expanded: bool = False  # on the device it has the model's dtype, whatever the checkpoint stores
