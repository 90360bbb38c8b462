"""Which layers of a model turn positions, and which see only a window: lists and rules of a config.json."""

from __future__ import annotations

from models.errors import ModelError
from models.fields import Fields
from models.registry import Architecture

# Rules that hold only where use_sliding_window says so
_OPTIONAL = ("every_if_used", "max_window_layers", "odd_until_max", "nope")


def find_rope_layers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has rotary positions: all do, but for the rule of transformers' SmolLM3Config."""
    if architecture.rope != "smollm3":
        return (True,) * num_layers
    has_rope = config.get("no_rope_layers")  # 1: it has
    if has_rope is None:
        interval = config.count("no_rope_layer_interval", default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(has_rope, list) or len(has_rope) < num_layers or not all(value in (0, 1) for value in has_rope):
        raise ModelError(
            f"{config.where}: no_rope_layers must be a list of 0 and 1 for {num_layers} layers, found {has_rope!r}"
        )
    return tuple(bool(value) for value in has_rope[:num_layers])


def find_sliding_layers(config: Fields, architecture: Architecture, has_rope: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether each layer is of the kind that sees only sliding_window tokens."""
    num_layers = len(has_rope)
    rule = architecture.sliding_layers
    if rule in ("none", "every"):
        return (rule == "every",) * num_layers
    if rule in _OPTIONAL and not config.flag("use_sliding_window"):
        return (False,) * num_layers
    if rule == "every_if_used":
        return (True,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is not None:
        return _read_layer_types(layer_types, num_layers, config.where)
    if rule in ("max_window_layers", "odd_until_max"):
        border = config.get("max_window_layers")
        border = 28 if border is None else border
        if isinstance(border, bool) or not isinstance(border, int):
            raise ModelError(f"{config.where}: max_window_layers must be an integer, found {border!r}")
        if rule == "odd_until_max":  # transformers' Qwen2MoeConfig, unlike its Qwen2Config; "odd" counts from 1
            return tuple(layer % 2 == 0 and layer < border for layer in range(num_layers))
        return tuple(layer >= border for layer in range(num_layers))
    if rule == "nope":
        return tuple(not rotates for rotates in has_rope)
    period = 2 if rule == "alternating" else config.count("sliding_window_pattern")
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def find_windows(config: Fields, is_sliding: tuple[bool, ...], *, max_context_len: int) -> tuple[int | None, ...]:
    """Each layer's window in tokens; None where nothing that fits the context is out of sight."""
    if not any(is_sliding) or config.get("sliding_window") is None:
        return (None,) * len(is_sliding)
    window = config.count("sliding_window")
    if window >= max_context_len:
        return (None,) * len(is_sliding)
    return tuple(window if slides else None for slides in is_sliding)


def _read_layer_types(layer_types: object, num_layers: int, where: str) -> tuple[bool, ...]:
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ModelError(f"{where}: layer_types must be a list of names, found {layer_types!r}")
    if len(layer_types) != num_layers:
        raise ModelError(f"{where}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"{where}: layer_types {unknown} are not supported")
    return tuple(kind == "sliding_attention" for kind in layer_types)
