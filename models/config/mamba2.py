"""Mamba2Config: the shape of Mamba-2 layers, and which layers are such: fields of a config.json.

Granite 4, Bamba and Falcon-H1 spell the fields alike; Nemotron-H has names of its own, and layers of one block each.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.architecture import Architecture
from models.config.layer_state import MAX_CONV_WIDTH, MAX_ROW_SIZE, LayerState, StateTensor
from models.config.matrix import Matrix
from models.errors import ModelError
from models.fields import Fields

if TYPE_CHECKING:
    from models.config.recurrence import Mixer

# The older and the newer spelling in layer_types
_MIXERS: dict[str, Mixer] = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
}
# A layer of Nemotron-H: letters of hybrid_override_pattern, and their names in layers_block_type
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Older names of Nemotron-H's fields, which win if they are there, as in transformers
_OLD_NAMES = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}

_MAX_LEAST_STEP = 0.001  # of published files of Nemotron-H; steps of trained models are larger


@dataclass(frozen=True)
class Mamba2Config:
    """Layers of Mamba-2."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    hidden_size: int
    block: str = "mamba"  # its name within a layer
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    # Of the output: with a norm over each group of channels, and then the gate behind it instead of before it, and
    # its weight applied in float32
    has_norm: bool = True
    has_norm_first: bool = False
    has_fp32_norm: bool = False
    time_step_limits: tuple[float, float] = (0.0, math.inf)
    in_multiplier: float = 1.0  # of the layer's input, and of the parts of its projection: z, x, B, C, dt
    multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def layer_state(self) -> LayerState:
        """What a layer keeps: the last inputs of x, B and C, and a matrix for each head."""
        heads, groups = (self.head_dim, self.num_heads), (self.state_size, self.num_groups)
        conv = StateTensor((heads, groups, groups), self.conv_width - 1)
        return LayerState(conv, StateTensor((heads,), self.state_size), StateTensor(((1, self.num_heads),), 1))

    @property
    def size(self) -> int:
        """The channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def part_sizes(self) -> dict[str, int]:
        """The outputs of the input projection, in their order."""
        groups = self.num_groups * self.state_size
        return {"z": self.size, "x": self.size, "b": groups, "c": groups, "dt": self.num_heads}

    @property
    def head_counts(self) -> dict[str, int]:
        """The number of heads that ranks share, by its name."""
        return {"heads of Mamba-2": self.num_heads}

    def share_of_rank(self, tp_size: int) -> Mamba2Config:
        """Return the heads and groups of one of tp_size ranks: one replicated group where ranks outnumber them."""
        num_heads, num_groups = self.num_heads // tp_size, max(self.num_groups // tp_size, 1)
        return dataclasses.replace(self, num_heads=num_heads, num_groups=num_groups)

    def matrices(self, hidden_size: int) -> Iterator[Matrix]:
        """Yield a layer's projections; those of the merged one, which ranks split apart, are several of one name."""
        for name, size in self.part_sizes.items():
            num_units = self.num_groups if name in ("b", "c") else 0
            yield Matrix(f"{self.block}.in_proj", size, hidden_size, "outputs", num_kv_heads=num_units)
        yield Matrix(f"{self.block}.out_proj", hidden_size, self.size, "inputs")

    @property
    def num_other_parameters(self) -> int:
        """The parameters of a layer beside its projections: convolution, A, D, bias of steps, norm and biases."""
        channels = self.size + 2 * self.num_groups * self.state_size
        count = channels * (self.conv_width + self.has_conv_bias) + 3 * self.num_heads + self.has_norm * self.size
        return count + self.has_in_bias * sum(self.part_sizes.values()) + self.has_out_bias * self.hidden_size


def parse_mamba2(config: Fields, architecture: Architecture) -> Mamba2Config:
    """Read the shape of the layers. Raises ModelError."""
    if architecture.recurrence == "nemotron":
        return _parse_nemotron(config)
    hidden_size, num_heads = config.count("hidden_size"), config.count("mamba_n_heads", default=128)
    size = config.count("mamba_expand", default=2) * hidden_size
    if architecture.recurrence == "falcon" and config.get("mamba_d_ssm") is not None:
        size = config.count("mamba_d_ssm")
    head_dim = config.get("mamba_d_head")
    head_dim = max(size // num_heads, 1) if head_dim in (None, "auto") else config.count("mamba_d_head")
    if head_dim * num_heads != size:
        raise ModelError(
            f"{config.where}: mamba_n_heads {num_heads} of mamba_d_head {head_dim} are not the {size} channels of"
            " mamba_expand times hidden_size, or of mamba_d_ssm"
        )
    shape = Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=_read_groups(config, "mamba_n_groups", default=1, num_heads=num_heads),
        state_size=config.count("mamba_d_state", default=256, most=MAX_ROW_SIZE),
        conv_width=_read_conv_width(config, "mamba_d_conv"),
        hidden_size=hidden_size,
        has_conv_bias=config.flag("mamba_conv_bias", default=True),
        has_in_bias=config.flag("mamba_proj_bias"),
        has_out_bias=config.flag("projectors_bias" if architecture.recurrence == "falcon" else "mamba_proj_bias"),
        time_step_limits=_read_limits(config, "time_step_limit"),
    )
    return _add_falcon(config, shape) if architecture.recurrence == "falcon" else shape


def _add_falcon(config: Fields, shape: Mamba2Config) -> Mamba2Config:
    """Add what Falcon-H1 has beside the others: its norm, or none, and constants."""
    return dataclasses.replace(
        shape,
        has_norm=config.flag("mamba_rms_norm"),
        has_norm_first=config.flag("mamba_norm_before_gate", default=True),
        has_fp32_norm=True,
        in_multiplier=config.positive("ssm_in_multiplier", default=1.0),
        multipliers=read_multipliers(config, "ssm_multipliers", length=5),
    )


def _parse_nemotron(config: Fields) -> Mamba2Config:
    names = {name: old if config.get(old) is not None else name for name, old in _OLD_NAMES.items()}
    limits = "time_step_limit" if config.get("mamba_dt_limit") is None else "mamba_dt_limit"
    config.pass_over(*_OLD_NAMES, "time_step_limit")
    _refuse_limits(config, limits)
    num_heads, has_bias = config.count("mamba_num_heads", default=128), config.flag("use_bias")
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=config.count("mamba_head_dim", default=64),
        num_groups=_read_groups(config, names["n_groups"], default=8, num_heads=num_heads),
        state_size=config.count("ssm_state_size", default=128, most=MAX_ROW_SIZE),
        conv_width=_read_conv_width(config, names["conv_kernel"]),
        hidden_size=config.count("hidden_size"),
        block="mixer",
        has_conv_bias=config.flag(names["use_conv_bias"], default=True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
    )


def _refuse_limits(config: Fields, name: str) -> None:
    """Raise ModelError for limits of Nemotron-H's time steps in which its implementations disagree.

    The authors' code limits all steps by time_step_limit; transformers limits those of prompts alone, by time_step_min.
    """
    if _read_limits(config, name) != (0.0, math.inf):
        raise ModelError(
            f"{config.where}: {name} is not supported: served is [0, Infinity] or None, found {config.get(name)!r}"
        )
    least = config.number("time_step_min", default=_MAX_LEAST_STEP)
    if least > _MAX_LEAST_STEP:
        raise ModelError(f"{config.where}: time_step_min {least} is not supported: served is at most {_MAX_LEAST_STEP}")


def _read_groups(config: Fields, name: str, *, default: int, num_heads: int) -> int:
    num_groups = config.count(name, default=default)
    if num_heads % num_groups != 0:
        raise ModelError(f"{config.where}: {name} {num_groups} does not divide the {num_heads} heads of Mamba-2")
    return num_groups


def _read_conv_width(config: Fields, name: str) -> int:
    width = config.count(name, default=4, most=MAX_CONV_WIDTH)
    if width < 2:
        raise ModelError(f"{config.where}: {name} must be at least 2, found {width}")
    return width


def _read_limits(config: Fields, name: str) -> tuple[float, float]:
    """Read the least and the largest time step; Infinity may be bare, or an object as transformers writes it."""
    value = config.get(name)
    if value is None:
        return 0.0, math.inf
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ModelError(f"{config.where}: {name} must be a list of two numbers, found {value!r}")
    low, high = (_as_number(each) for each in value)
    if low is None or high is None or not 0 <= low <= high or low == math.inf:
        raise ModelError(f"{config.where}: {name} must be two numbers from 0, the larger one last, found {value!r}")
    return low, high


def _as_number(value: Any) -> float | None:
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return math.inf if value > sys.float_info.max else float(value)


def read_multipliers(config: Fields, name: str, *, length: int) -> tuple[float, ...]:
    """Read a list of constants, 1 each if it is missing. Raises ModelError."""
    values = config.get(name)
    if values is None:
        return (1.0,) * length
    if not isinstance(values, list) or len(values) != length:
        raise ModelError(f"{config.where}: {name} must be a list of {length} numbers, found {values!r}")
    return tuple(Fields({name: value}, config.where).positive(name) for value in values)


def find_mamba_layers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[Mixer, ...]:
    """Return what mixes the tokens of each layer. Raises ModelError."""
    mixers: tuple[Mixer, ...]
    if architecture.recurrence == "falcon":
        both: list[Mixer] = ["both"] * num_layers
        return tuple(both)
    if architecture.recurrence == "bamba":
        mixers = _read_indices(config, num_layers)
    else:
        mixers = tuple(_MIXERS.get(kind, "none") for kind in read_block_kinds(config, architecture))
    if len(mixers) != num_layers:
        raise ModelError(f"{config.where}: layer_types has {len(mixers)} entries for {num_layers} layers")
    if "attention" not in mixers:
        raise ModelError(f"{config.where}: none of its {num_layers} layers has attention: served are models with some")
    return mixers


def _read_indices(config: Fields, num_layers: int) -> tuple[Mixer, ...]:
    indices = config.get("attn_layer_indices")
    config.pass_over("layers_block_type", "layer_types")  # transformers derives them
    indices = [] if indices is None else indices
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < num_layers for index in indices):
        raise ModelError(
            f"{config.where}: attn_layer_indices must be indices of the {num_layers} layers, found {indices!r}"
        )
    return tuple("attention" if layer in indices else "recurrent" for layer in range(num_layers))


def find_bare_layers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer that mixes tokens and has no MLP."""
    if architecture.recurrence != "nemotron":
        return (False,) * num_layers
    return tuple(kind in _MIXERS for kind in read_block_kinds(config, architecture))


def read_num_blocks(config: Fields, architecture: Architecture) -> int:
    """Return the layers of Nemotron-H, which its list of kinds counts. Raises ModelError."""
    num_layers, stated = len(read_block_kinds(config, architecture)), config.get("num_hidden_layers")
    if stated is not None and stated != num_layers:
        raise ModelError(
            f"{config.where}: hybrid_override_pattern or layers_block_type has {num_layers} layers, but"
            f" num_hidden_layers is {stated!r}"
        )
    return num_layers


def read_block_kinds(config: Fields, architecture: Architecture) -> list[str]:
    """Return the kind of each layer by its name: a key of _MIXERS, or for Nemotron-H "mlp" or "moe".

    Raises ModelError, also if two spellings of the list disagree.
    """
    is_nemotron = architecture.recurrence == "nemotron"
    names = ("layers_block_type", "layer_types", *(("hybrid_override_pattern",) if is_nemotron else ()))
    given = [name for name in names if config.get(name) is not None] or ["layer_types"]
    served = {*_MIXERS, "mlp", "moe"} if is_nemotron else set(_MIXERS)
    lists = [_read_kinds(config, name, served) for name in given]
    for name, kinds in zip(given[1:], lists[1:], strict=True):
        if [_MIXERS.get(kind, kind) for kind in kinds] != [_MIXERS.get(kind, kind) for kind in lists[0]]:
            raise ModelError(f"{config.where}: {given[0]} and {name} name other kinds of layers: remove one")
    return lists[0]


def _read_kinds(config: Fields, name: str, served: set[str]) -> list[str]:
    """Read one spelling of the kinds of all layers: a list of names, or a text with a letter for each."""
    kinds = config.get(name)
    if name == "hybrid_override_pattern":
        unknown = sorted(set(kinds) - set(_LETTERS)) if isinstance(kinds, str) else [kinds]
        if unknown:
            raise ModelError(
                f"{config.where}: hybrid_override_pattern must be letters of {''.join(_LETTERS)}, found {unknown[0]!r}"
            )
        return [_LETTERS[letter] for letter in kinds]
    if not isinstance(kinds, list) or not kinds:
        raise ModelError(f"{config.where}: {name} must be a list with the kind of each layer, found {kinds!r}")
    unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in served]
    if unknown:
        raise ModelError(
            f"{config.where}: {name} {unknown[0]!r} is not supported: served are {', '.join(sorted(served))}"
        )
    return kinds
