"""Scales of an fp8 KV pool, as quantised checkpoints name them: numbers, one per layer for keys and one for values."""

from __future__ import annotations

from kernels.elementwise.reference import KVScales
from models.errors import ModelError
from models.weights.weights import Weights

# Relative to self_attn: of compressed-tensors and Quark; of ModelOpt; of compressed-tensors before 0.8; of AutoFP8.
# All say what the stored fp8 number is multiplied by
_K_NAMES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_V_NAMES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
# Of attention computed in fp8, which ours is not: read, so that they are not left over
_UNUSED_NAMES = ("q_scale", "prob_scale", "prob_output_scale")


def read_kv_scales(w: Weights) -> KVScales:
    """Read a layer's scales, 1.0 where the checkpoint has none. w: of self_attn. Raises ModelError."""
    for name in _UNUSED_NAMES:
        w.optional(name)
    return KVScales(k=_read(w, _K_NAMES), v=_read(w, _V_NAMES))


def _read(w: Weights, names: tuple[str, ...]) -> float:
    """The first of the names that is there. Of one scale per head, the largest: it has room for every head."""
    found = {name: scales for name in names if (scales := w.optional(name)) is not None}
    if not found:
        return 1.0
    name, scales = next(iter(found.items()))
    if scales.numel() == 0 or not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"tensor {w.full_name(name)} must hold positive numbers, found {scales}")
    return float(scales.max())
