"""Gemma 4's fields of a config.json: layers of unequal shape, shared keys and values, inputs of each layer.

find_layer_caches returns what each layer keeps: full-attention layers have heads of their own number and size, and the
last layers read the keys and values of an earlier layer of their kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.config.layer_cache import LayerCache
from models.errors import ModelError
from models.fields import Fields

_OVERRIDES = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True)
class Gemma4Config:
    """What only Gemma 4 has."""

    layer_input_size: int  # width of each layer's own input; 0: none
    layer_input_vocab_size: int
    has_wide_mlp: bool  # the MLP of layers with shared keys and values is twice as wide

    def count_parameters(self, hidden_size: int, num_layers: int, *, has_experts: bool) -> int:
        """Count the parameters that other models do not have, without those of routers and experts."""
        size = self.layer_input_size
        count = num_layers * (1 + 3 * hidden_size * has_experts)
        if size:
            count += num_layers * (2 * hidden_size * size + hidden_size)
            count += num_layers * size * (self.layer_input_vocab_size + hidden_size) + size
        return count


def parse_gemma4(config: Fields) -> Gemma4Config:
    """Read the fields. Raises ModelError."""
    size = _whole_number(config, "hidden_size_per_layer_input", default=256)
    return Gemma4Config(
        layer_input_size=size,
        layer_input_vocab_size=config.count("vocab_size_per_layer_input", default=262_144),
        has_wide_mlp=config.flag("use_double_wide_mlp"),
    )


def find_layer_caches(
    config: Fields, *, num_heads: int, num_kv_heads: int, head_dim: int, is_sliding: Sequence[bool]
) -> tuple[LayerCache, ...]:
    """Return each layer's cache, as of full attention. Raises ModelError."""
    shapes = _read_shapes(config, num_kv_heads=num_kv_heads, head_dim=head_dim, is_sliding=is_sliding)
    for layer, (kv_heads, size) in enumerate(shapes):
        if num_heads % kv_heads != 0 or size % 2 != 0:
            is_listed = config.get("per_layer_config") is not None
            field = "per_layer_config" if is_listed else _global_field(config, is_size=size % 2 != 0)
            raise ModelError(
                f"{config.where}: {field}: layer {layer} has {kv_heads} KV heads of {size} numbers for {num_heads}"
                " query heads:"
                " the first must divide the third, and the second be even"
            )
    num_layers = len(is_sliding)
    num_shared = _whole_number(config, "num_kv_shared_layers", default=0)
    if num_shared >= num_layers:
        raise ModelError(f"{config.where}: num_kv_shared_layers {num_shared} leaves none of {num_layers} layers")
    owners = range(num_layers - num_shared)
    last = {is_sliding[layer]: layer for layer in owners}
    caches = []
    for layer, (kv_heads, size) in enumerate(shapes):
        owner = None if layer in owners else last.get(is_sliding[layer], -1)
        if owner is not None and (owner < 0 or shapes[owner] != shapes[layer]):
            raise ModelError(
                f"{config.where}: num_kv_shared_layers {num_shared}: layer {layer} has no layer of its kind and heads"
                " before them whose keys it could read"
            )
        are_keys = config.flag("attention_k_eq_v") and not is_sliding[layer]
        caches.append(LayerCache(kv_heads, size, size, shares=owner, values_are_keys=are_keys))
    return tuple(caches)


def _global_field(config: Fields, *, is_size: bool) -> str:
    """Return the field by which the shape of full-attention layers is wrong, with its value."""
    name = "global_head_dim" if is_size else "num_global_key_value_heads"
    return f"{name} {config.get(name)}"


def _read_shapes(
    config: Fields, *, num_kv_heads: int, head_dim: int, is_sliding: Sequence[bool]
) -> list[tuple[int, int]]:
    """Return each layer's KV heads and head size, in either of the spellings of transformers' Gemma4TextConfig."""
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        size = config.count("global_head_dim", default=512)
        kv_heads = config.count("num_global_key_value_heads", default=num_kv_heads)
        kv_heads = kv_heads if config.flag("attention_k_eq_v") else num_kv_heads
        return [(num_kv_heads, head_dim) if slides else (kv_heads, size) for slides in is_sliding]
    config.pass_over("global_head_dim", "num_global_key_value_heads")
    if not isinstance(by_layer, Mapping) or not all(isinstance(value, Mapping) for value in by_layer.values()):
        raise ModelError(f"{config.where}: per_layer_config must map layers to objects, found {by_layer!r}")
    layers: dict[int, Mapping[str, Any]] = {}
    for name, value in by_layer.items():
        layer = int(name) if str(name).isdecimal() else -1  # "05" where there are ten layers or more
        if not 0 <= layer < len(is_sliding) or layer in layers:
            raise ModelError(
                f"{config.where}: per_layer_config must name each layer from 0 to {len(is_sliding) - 1} at most once,"
                f" found {name!r}"
            )
        layers[layer] = value
    shapes = []
    for layer in range(len(is_sliding)):
        fields = Fields(layers.get(layer, {}), f"{config.where}, per_layer_config of layer {layer}")
        unknown = sorted(set(fields.raw) - set(_OVERRIDES))
        if unknown:
            raise ModelError(f"{fields.where}: {', '.join(unknown)} not supported: {' and '.join(_OVERRIDES)} are")
        kv_heads = fields.count("num_key_value_heads", default=num_kv_heads)
        shapes.append((kv_heads, fields.count("head_dim", default=head_dim)))
    return shapes


def _whole_number(config: Fields, name: str, *, default: int) -> int:
    """Read an integer that is not negative."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"{config.where}: {name} must be an integer that is not negative, found {value!r}")
    return value
