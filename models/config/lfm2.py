"""Fields of LFM2's configs: its short convolutions, the layers that have them, and the width of its dense MLP."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.config.layer_state import MAX_CONV_WIDTH, LayerState, StateTensor
from models.config.matrix import Matrix
from models.errors import ModelError
from models.fields import Fields

if TYPE_CHECKING:
    from models.config.recurrence import Mixer


@dataclass(frozen=True)
class ShortConvConfig:
    """Layers that are a gated convolution alone."""

    num_channels: int
    conv_width: int
    hidden_size: int
    has_bias: bool = False  # of the convolution and of both projections

    @property
    def layer_state(self) -> LayerState:
        """What a layer keeps: the last inputs of each channel."""
        return LayerState(StateTensor(((1, self.num_channels),), self.conv_width - 1))

    @property
    def head_counts(self) -> dict[str, int]:
        """The numbers of channels that ranks share, by their name in a config.json."""
        return {"hidden_size": self.num_channels}

    def share_of_rank(self, tp_size: int) -> ShortConvConfig:
        """Return the channels of one of tp_size ranks."""
        return dataclasses.replace(self, num_channels=self.num_channels // tp_size)

    def matrices(self, hidden_size: int) -> Iterator[Matrix]:
        """Yield a layer's projections; the merged one, which ranks split in three, is three of one name."""
        for _ in range(3):
            yield Matrix("conv.in_proj", self.num_channels, hidden_size, "outputs")
        yield Matrix("conv.out_proj", hidden_size, self.num_channels, "inputs")

    @property
    def num_other_parameters(self) -> int:
        """The parameters of a layer beside its projections: the convolution, and all biases."""
        return self.num_channels * (self.conv_width + 4 * self.has_bias) + self.hidden_size * self.has_bias


def parse_short_conv(config: Fields) -> ShortConvConfig:
    """Read the shape of the convolutions. Raises ModelError."""
    width = config.count("conv_L_cache", default=3, most=MAX_CONV_WIDTH)
    if width < 2:
        raise ModelError(f"{config.where}: conv_L_cache must be at least 2, found {width}")
    size = config.count("hidden_size")
    return ShortConvConfig(size, width, size, config.flag("conv_bias"))


def find_conv_layers(config: Fields, num_layers: int) -> tuple[Mixer, ...]:
    """Return what mixes the tokens of each layer, by layer_types or its older spelling full_attn_idxs.

    Raises ModelError.
    """
    kinds, indices = config.get("layer_types"), config.get("full_attn_idxs")
    if kinds is not None:
        names = {"conv", "full_attention"}
        if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= names:
            raise ModelError(
                f"{config.where}: layer_types must be a list of 'conv' and 'full_attention' for {num_layers} layers,"
                f" found {kinds!r}"
            )
        listed = [layer for layer in range(num_layers) if kinds[layer] == "full_attention"]
        if indices is not None and indices != listed:
            raise ModelError(
                f"{config.where}: full_attn_idxs {indices!r} are not the layers {listed} that layer_types has as"
                " full_attention: remove one"
            )
        indices = listed
    if indices is None:
        indices = list(range(num_layers))
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < num_layers for index in indices):
        raise ModelError(
            f"{config.where}: full_attn_idxs must be indices of the {num_layers} layers, found {indices!r}"
        )
    if not indices:
        raise ModelError(f"{config.where}: none of its {num_layers} layers has attention: served are models with some")
    return tuple("attention" if layer in indices else "recurrent" for layer in range(num_layers))


def read_mlp_width(config: Fields) -> int:
    """Return the width of the dense MLP: two thirds of the stated one, rounded up, if the config asks for that."""
    stated = "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim"
    width = config.count(stated)
    config.pass_over("intermediate_size", "block_ffn_dim_multiplier", "block_multiple_of")
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width, multiple = int(2 * width / 3), config.count("block_multiple_of", default=256)
    if "block_ffn_dim_multiplier" in config.raw and config.get("block_ffn_dim_multiplier") is None:
        return _refuse_no_width(config, width, stated)  # transformers: null also switches the rounding off
    scaled = config.positive("block_ffn_dim_multiplier", default=1.0) * width
    if math.isinf(scaled):
        raise ModelError(f"{config.where}: block_ffn_dim_multiplier times {width} is no width")
    width = int(scaled)
    return _refuse_no_width(config, -(-width // multiple) * multiple, stated)


def read_tied(config: Fields) -> bool:
    """Return whether the head is the embedding; the older spelling wins, as in transformers."""
    config.pass_over("tie_word_embeddings")
    return config.flag("tie_word_embeddings" if config.get("tie_embedding") is None else "tie_embedding")


def _refuse_no_width(config: Fields, width: int, stated: str) -> int:
    if width < 1:
        raise ModelError(f"{config.where}: {stated} {config.get(stated)!r} gives an MLP of width {width}")
    return width
