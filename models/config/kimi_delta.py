"""KimiDeltaConfig: the shape of layers of Kimi delta attention, and which layers are such: fields of a config.json.

Published files have an object linear_attn_config, which counts layers from 1; transformers writes layer_types and other
fields beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.config.delta_net import read_layer_kinds
from models.config.layer_state import MAX_CONV_WIDTH, MAX_ROW_SIZE, LayerState, StateTensor
from models.config.matrix import Matrix
from models.errors import ModelError
from models.fields import Fields

if TYPE_CHECKING:
    from models.config.recurrence import Mixer

_SECTION = "linear_attn_config"
_ATTENTION_LAYERS, _RECURRENT_LAYERS = "full_attn_layers", "kda_layers"
# The names in that object, and transformers' own, which count where the object has none
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


@dataclass(frozen=True)
class KimiDeltaConfig:
    """Layers of the delta rule with a gate for each key dimension."""

    num_heads: int
    head_dim: int  # of queries, keys and values; also the width between both products of a gate
    conv_width: int

    @property
    def num_channels(self) -> int:
        """The numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def layer_state(self) -> LayerState:
        """What a layer keeps: the last inputs of queries, keys and values, and a matrix for each head.

        A token also gives a head's update strength, and the vector from which all gates are computed.
        """
        heads = (self.head_dim, self.num_heads)
        return LayerState(
            StateTensor((heads,) * 3, self.conv_width - 1),
            StateTensor((heads,), self.head_dim),
            StateTensor(((1, self.num_heads), (self.head_dim, 1)), 1),
        )

    @property
    def head_counts(self) -> dict[str, int]:
        """The number of heads that ranks share, by its name in a config.json."""
        return {f"num_heads of {_SECTION}": self.num_heads}

    def share_of_rank(self, tp_size: int) -> KimiDeltaConfig:
        """Return the heads of one of tp_size ranks."""
        return dataclasses.replace(self, num_heads=self.num_heads // tp_size)

    def matrices(self, hidden_size: int) -> Iterator[Matrix]:
        """Yield a layer's projections. Every rank has the first products of gates whole."""
        for name in ("q_proj", "k_proj", "v_proj"):
            yield Matrix(f"self_attn.{name}", self.num_channels, hidden_size, "outputs")
        yield Matrix("self_attn.b_proj", self.num_heads, hidden_size, "outputs")
        for gate in "fg":
            yield Matrix(f"self_attn.{gate}_a_proj", self.head_dim, hidden_size, "outputs", num_kv_heads=1)
            yield Matrix(f"self_attn.{gate}_b_proj", self.num_channels, self.head_dim, "outputs")
        yield Matrix("self_attn.o_proj", hidden_size, self.num_channels, "inputs")

    @property
    def num_other_parameters(self) -> int:
        """The parameters of a layer beside its projections: convolutions, decays and norm."""
        return 3 * self.num_channels * self.conv_width + self.num_heads + self.num_channels + self.head_dim


def parse_kimi_delta(config: Fields) -> KimiDeltaConfig:
    """Read the shape of the layers; defaults are those of transformers' KimiLinearConfig. Raises ModelError."""
    section = _section(config)
    known = (_ATTENTION_LAYERS, _RECURRENT_LAYERS, *_SIZES)
    for name, value in section.raw.items():
        if value is not None and name not in known:
            raise ModelError(f"{section.where}: {name} {value!r} is not supported: served are {', '.join(known)}")
    config.pass_over(*_SIZES.values())

    def count(name: str, *, default: int, most: int | None = None) -> int:
        fields, own = (config, _SIZES[name]) if section.get(name) is None else (section, name)
        found = fields.count(own, default=default)
        if most is not None and not 1 < found <= most:
            raise ModelError(f"{fields.where}: {own} {found} is not supported: served are 2 to {most}")
        return found

    return KimiDeltaConfig(
        num_heads=count("num_heads", default=32),
        head_dim=count("head_dim", default=128, most=MAX_ROW_SIZE),
        conv_width=count("short_conv_kernel_size", default=4, most=MAX_CONV_WIDTH),
    )


def find_kimi_layers(config: Fields, num_layers: int) -> tuple[Mixer, ...]:
    """Return what mixes the tokens of each layer. Raises ModelError, also if both spellings disagree."""
    listed, layer_types = _read_lists(_section(config), num_layers), config.get("layer_types")
    is_recurrent = listed
    if layer_types is not None:
        is_recurrent = read_layer_kinds(config, layer_types, num_layers)
        if listed is not None and listed != is_recurrent:
            raise ModelError(f"{config.where}: layer_types and {_SECTION} name other layers of attention: remove one")
    if is_recurrent is None:  # transformers, KimiLinearConfig
        is_recurrent = tuple(layer == 0 or layer % 4 != 0 for layer in range(num_layers))
    if all(is_recurrent):
        raise ModelError(f"{config.where}: none of its {num_layers} layers has attention: served are models with some")
    return tuple("recurrent" if recurs else "attention" for recurs in is_recurrent)


def _section(config: Fields) -> Fields:
    return Fields(config.section(_SECTION).raw, f"{config.where}: {_SECTION}")


def _read_lists(section: Fields, num_layers: int) -> tuple[bool, ...] | None:
    """Return True for each recurrent layer by the lists of both kinds, which count from 1; None: there are none."""
    names = (_ATTENTION_LAYERS, _RECURRENT_LAYERS)
    if all(section.get(name) is None for name in names):
        return None
    found: list[int] = []
    for name in names:
        numbers = section.get(name)
        if not isinstance(numbers, list) or not all(type(each) is int and 1 <= each <= num_layers for each in numbers):
            raise ModelError(f"{section.where}: {name} must be layers from 1 to {num_layers}, found {numbers!r}")
        found += numbers
    if sorted(found) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"{section.where}: {names[0]} and {names[1]} must name each of the {num_layers} layers once, found"
            f" {section.get(names[0])!r} and {section.get(names[1])!r}"
        )
    return tuple(layer + 1 in section.get(_RECURRENT_LAYERS) for layer in range(num_layers))
