"""DeltaNetConfig: the shape of layers of the gated delta rule, and which layers are such: fields of a config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from models.architecture import Architecture
from models.config.layer_state import MAX_CONV_WIDTH, MAX_ROW_SIZE, LayerState, StateTensor
from models.config.matrix import Matrix
from models.errors import ModelError
from models.fields import Fields

# The projections of queries, keys, values, output gates (z), update strengths (b) and decays (a) in checkpoints:
# "grouped": in_proj_qkvz and in_proj_ba, by key head (Qwen3-Next); "flat": in_proj_qkv, in_proj_z, in_proj_b and
# in_proj_a (Qwen3.5); "separate": six, and three convolutions (OLMo-Hybrid)
DeltaNetLayout = Literal["grouped", "flat", "separate"]
_LAYOUTS: dict[str, DeltaNetLayout] = {"qwen3_next": "grouped", "qwen3_5": "flat", "olmo_hybrid": "separate"}
# The older and the newer spelling in layer_types; transformers writes the newer one
_RECURRENT, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


@dataclass(frozen=True)
class DeltaNetConfig:
    """Layers of the gated delta rule."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layout: DeltaNetLayout = "flat"
    max_beta: float = 1.0  # of the update strengths; 2: a state's eigenvalues may be negative

    @property
    def layer_state(self) -> LayerState:
        """What a layer keeps: the last inputs of queries, keys and values, and a matrix for each value head."""
        keys, values = (self.key_dim, self.num_key_heads), (self.value_dim, self.num_value_heads)
        conv = StateTensor((keys, keys, values), self.conv_width - 1)
        return LayerState(conv, StateTensor((values,), self.key_dim), StateTensor(((2, self.num_value_heads),), 1))

    @property
    def head_counts(self) -> dict[str, int]:
        """The numbers of heads that ranks share, by their names in a config.json."""
        return {"linear_num_key_heads": self.num_key_heads, "linear_num_value_heads": self.num_value_heads}

    def share_of_rank(self, tp_size: int) -> DeltaNetConfig:
        """Return the heads of one of tp_size ranks."""
        return dataclasses.replace(
            self, num_key_heads=self.num_key_heads // tp_size, num_value_heads=self.num_value_heads // tp_size
        )

    def matrices(self, hidden_size: int) -> Iterator[Matrix]:
        """Yield a layer's projections; those of a merged matrix that ranks split apart are several of one name."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        heads = self.num_value_heads
        if self.layout == "grouped":
            outputs = [("in_proj_qkvz", 2 * keys + 2 * values), ("in_proj_ba", 2 * heads)]
        elif self.layout == "flat":
            outputs = [("in_proj_qkv", keys), ("in_proj_qkv", keys), ("in_proj_qkv", values)]
            outputs += [("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads)]
        else:
            outputs = [("q_proj", keys), ("k_proj", keys), ("v_proj", values), ("g_proj", values)]
            outputs += [("b_proj", heads), ("a_proj", heads)]
        for name, size in outputs:
            yield Matrix(f"linear_attn.{name}", size, hidden_size, "outputs")
        yield Matrix(
            f"linear_attn.{'o_proj' if self.layout == 'separate' else 'out_proj'}", hidden_size, values, "inputs"
        )

    @property
    def num_other_parameters(self) -> int:
        """The parameters of a layer beside its projections: convolution, decays and norm."""
        channels = 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
        return channels * self.conv_width + 2 * self.num_value_heads + self.value_dim


def parse_delta_net(config: Fields, architecture: Architecture) -> DeltaNetConfig:
    """Read the shape of the layers; defaults that a row does not give are OlmoHybridConfig's. Raises ModelError."""
    num_heads, hidden_size = config.count("num_attention_heads"), config.count("hidden_size")
    num_key_heads = config.count("linear_num_key_heads", default=num_heads)
    num_value_heads = config.count("linear_num_value_heads", default=num_heads)
    if num_value_heads % num_key_heads != 0:
        raise ModelError(
            f"{config.where}: linear_num_value_heads {num_value_heads} is not divisible by"
            f" linear_num_key_heads {num_key_heads}"
        )
    key_dim = config.count("linear_key_head_dim", default=int(0.75 * hidden_size / num_key_heads), most=MAX_ROW_SIZE)
    conv_width = config.count("linear_conv_kernel_dim", default=4, most=MAX_CONV_WIDTH)
    if conv_width < 2:
        raise ModelError(f"{config.where}: linear_conv_kernel_dim {conv_width} is not supported: served are 2 and more")
    layout = _LAYOUTS[architecture.recurrence]
    return DeltaNetConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=config.count("linear_value_head_dim", default=2 * key_dim),
        conv_width=conv_width,
        layout=layout,
        max_beta=2.0 if layout == "separate" and config.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )


def find_delta_layers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer of the gated delta rule, False for attention. Raises ModelError."""
    layer_types = config.get("layer_types")
    config.pass_over("full_attention_interval")
    if layer_types is None:
        interval = 4 if architecture.recurrence == "olmo_hybrid" else config.count("full_attention_interval", default=4)
        is_recurrent = [(layer + 1) % interval != 0 for layer in range(num_layers)]
        if architecture.recurrence == "olmo_hybrid" and all(is_recurrent):
            is_recurrent[-1] = False
    else:
        is_recurrent = list(read_layer_kinds(config, layer_types, num_layers))
    if all(is_recurrent):
        raise ModelError(f"{config.where}: none of its {num_layers} layers has attention: served are models with some")
    return tuple(is_recurrent)


def read_layer_kinds(config: Fields, layer_types: object, num_layers: int) -> tuple[bool, ...]:
    """Return True for each recurrent layer of the list layer_types, False for attention. Raises ModelError."""
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelError(
            f"{config.where}: layer_types must be a list of {num_layers} names, one for each layer, found"
            f" {layer_types!r}"
        )
    unknown = [kind for kind in layer_types if kind not in (*_RECURRENT, *_ATTENTION)]
    if unknown:
        raise ModelError(
            f"{config.where}: layer_types {unknown[0]!r} is not supported: served are {_RECURRENT[0]!r} and"
            f" {_ATTENTION[0]!r}"
        )
    return tuple(kind in _RECURRENT for kind in layer_types)
