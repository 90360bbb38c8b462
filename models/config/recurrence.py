"""The shapes of recurrent layers, and which layers of a model are recurrent: read from a config.json.

Each shape says what its layers keep of a request (LayerState).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.architecture import Architecture
from models.config.delta_net import DeltaNetConfig, find_delta_layers, parse_delta_net
from models.config.layer_state import LayerState, StateTensor
from models.fields import Fields

DELTA_NETS = ("qwen3_next", "qwen3_5", "olmo_hybrid")  # of Architecture.recurrence
# What mixes the tokens of a layer: attention, a recurrence, both side by side, or nothing (an MLP alone)
Mixer = Literal["attention", "recurrent", "both", "none"]


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


@dataclass(frozen=True)
class ShortConvConfig:
    """Layers that are a gated convolution alone."""

    num_channels: int
    conv_width: int

    @property
    def layer_state(self) -> LayerState:
        """What a layer keeps: the last inputs of each channel."""
        return LayerState(StateTensor(((1, self.num_channels),), self.conv_width - 1))


RecurrenceConfig = DeltaNetConfig | Mamba2Config | ShortConvConfig


def parse_recurrence(config: Fields, architecture: Architecture) -> RecurrenceConfig | None:
    """Read the shape of the recurrent layers; None for an architecture without any. Raises ModelError."""
    if architecture.recurrence in DELTA_NETS:
        return parse_delta_net(config, architecture)
    return None


def find_mixers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[Mixer, ...]:
    """Return what mixes the tokens of each layer. Raises ModelError naming the field that does not add up."""
    mixers: list[Mixer] = ["attention"] * num_layers
    if architecture.recurrence in DELTA_NETS:
        is_recurrent = find_delta_layers(config, architecture, num_layers)
        mixers = ["recurrent" if recurs else "attention" for recurs in is_recurrent]
    return tuple(mixers)
