"""The shapes of recurrent layers, and which layers of a model are recurrent: read from a config.json.

Each shape says what its layers keep of a request (LayerState).
"""

from __future__ import annotations

from typing import Literal

from models.architecture import Architecture
from models.config.delta_net import DeltaNetConfig, find_delta_layers, parse_delta_net
from models.config.kimi_delta import KimiDeltaConfig, find_kimi_layers, parse_kimi_delta
from models.config.lfm2 import ShortConvConfig, find_conv_layers, parse_short_conv
from models.config.mamba2 import Mamba2Config, find_mamba_layers, parse_mamba2
from models.fields import Fields

DELTA_NETS = ("qwen3_next", "qwen3_5", "olmo_hybrid")  # of Architecture.recurrence
# What mixes the tokens of a layer: attention, a recurrence, both side by side, or nothing (an MLP alone)
Mixer = Literal["attention", "recurrent", "both", "none"]


RecurrenceConfig = DeltaNetConfig | KimiDeltaConfig | Mamba2Config | ShortConvConfig


def parse_recurrence(config: Fields, architecture: Architecture) -> RecurrenceConfig | None:
    """Read the shape of the recurrent layers; None for an architecture without any. Raises ModelError."""
    if architecture.recurrence in DELTA_NETS:
        return parse_delta_net(config, architecture)
    if architecture.recurrence == "kimi_linear":
        return parse_kimi_delta(config)
    if architecture.recurrence == "lfm2":
        return parse_short_conv(config)
    return None if architecture.recurrence == "none" else parse_mamba2(config, architecture)


def find_mixers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[Mixer, ...]:
    """Return what mixes the tokens of each layer. Raises ModelError naming the field that does not add up."""
    if architecture.recurrence in DELTA_NETS:
        kinds: dict[bool, Mixer] = {True: "recurrent", False: "attention"}
        return tuple(kinds[recurs] for recurs in find_delta_layers(config, architecture, num_layers))
    if architecture.recurrence == "kimi_linear":
        return find_kimi_layers(config, num_layers)
    if architecture.recurrence == "lfm2":
        return find_conv_layers(config, num_layers)
    if architecture.recurrence != "none":
        return find_mamba_layers(config, architecture, num_layers)
    mixers: list[Mixer] = ["attention"] * num_layers
    return tuple(mixers)
