"""The shapes of recurrent layers, and which layers of a model are recurrent: read from a config.json.

Each shape says what its layers keep of a request (LayerState).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.architecture import Architecture
from models.config.layer_state import LayerState, StateTensor
from models.config.lfm2 import ShortConvConfig, find_conv_layers, parse_short_conv
from models.fields import Fields

# What mixes the tokens of a layer: attention, a recurrence, both side by side, or nothing (an MLP alone)
Mixer = Literal["attention", "recurrent", "both", "none"]


@dataclass(frozen=True)
class DeltaNetConfig:
    """Layers of the gated delta rule."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def layer_state(self) -> LayerState:
        """What a layer keeps: the last inputs of queries, keys and values, and a matrix for each value head."""
        keys, values = (self.key_dim, self.num_key_heads), (self.value_dim, self.num_value_heads)
        conv = StateTensor((keys, keys, values), self.conv_width - 1)
        return LayerState(conv, StateTensor((values,), self.key_dim), StateTensor(((2, self.num_value_heads),), 1))


@dataclass(frozen=True)
class Mamba2Config:
    """Layers of Mamba-2."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int

    @property
    def layer_state(self) -> LayerState:
        """What a layer keeps: the last inputs of x, B and C, and a matrix for each head."""
        heads, groups = (self.head_dim, self.num_heads), (self.state_size, self.num_groups)
        conv = StateTensor((heads, groups, groups), self.conv_width - 1)
        return LayerState(conv, StateTensor((heads,), self.state_size), StateTensor(((1, self.num_heads),), 1))


RecurrenceConfig = DeltaNetConfig | Mamba2Config | ShortConvConfig


def parse_recurrence(config: Fields, architecture: Architecture) -> RecurrenceConfig | None:
    """Read the shape of the recurrent layers; None for an architecture without any. Raises ModelError."""
    if architecture.recurrence == "lfm2":
        return parse_short_conv(config)
    return None


def find_mixers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[Mixer, ...]:
    """Return what mixes the tokens of each layer. Raises ModelError naming the field that does not add up."""
    if architecture.recurrence == "lfm2":
        return find_conv_layers(config, num_layers)
    mixers: list[Mixer] = ["attention"] * num_layers
    return tuple(mixers)
