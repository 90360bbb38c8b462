"""RopeConfig: the rotary part of a config.json, old spelling (rope_theta, rope_scaling) or new (rope_parameters).

models/layers/rotary.py computes the tables from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from models.architecture import Architecture
from models.errors import ModelError
from models.fields import MAX_COUNT, Fields

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_KNOWN = """
    attention_factor beta_fast beta_slow factor high_freq_factor long_factor low_freq_factor mscale mscale_all_dim
    original_max_position_embeddings partial_rotary_factor rope_theta rope_type short_factor truncate type
"""
# Architecture.rope: rope_parameters has an object for each kind of layers
_BY_KIND = ("gemma3", "gemma4", "olmo3", "mellum")
# A note, the axes of a picture's positions, which are equal for text, and a copy of the field outside
_HARMLESS = ("finetuned", "mrope_section", "mrope_interleaved", "max_position_embeddings")


@dataclass(frozen=True)
class RopeConfig:
    """Settings of rotary positions. Fields after `partial_rotary_factor` apply only to the types in their comments."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0  # context extension factor: every type but default
    # share of each head's dimensions that are rotated; proportional: of its pairs that turn, the others by angle 0
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int = 0  # length before extension: dynamic, llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope; None: computed
    mscale: float = 0.0  # yarn; 0: unset
    mscale_all_dim: float = 0.0  # yarn; 0: unset
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: factor on each pair's wavelength, up to the original length
    long_factors: tuple[float, ...] = ()  # longrope: the same, beyond the original length
    # Phi-3.5-MoE's longrope: factors on cosines and sines in place of attention_factor's, up to and beyond that length
    short_mscale: float | None = None
    long_mscale: float | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of each head."""
        return head_dim if self.type == "proportional" else int(head_dim * self.partial_rotary_factor)

    def is_long(self, max_context_len: int) -> bool:
        """Return whether the longest request, in tokens, makes longrope use its long factors."""
        return self.type == "longrope" and max_context_len > self.original_max_position_embeddings

    def reach(self, max_position_embeddings: int) -> int:
        """Return the tokens that positions cover. llama3 and longrope checkpoints state the extended length."""
        if self.type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.type == "yarn":
            return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return max_position_embeddings


def parse_ropes(
    config: Fields,
    architecture: Architecture,
    *,
    has_rope: Sequence[bool],
    is_sliding: Sequence[bool],
    head_dims: Sequence[int],
    max_position_embeddings: int,
) -> tuple[RopeConfig | None, ...]:
    """Return each layer's rotary positions, None where has_rope is False. Raises ModelError."""
    shape = _Shape(architecture, head_dims[0], max_position_embeddings)
    if architecture.rope == "gemma4":
        return _parse_by_kind(config, shape, is_sliding=is_sliding, head_dims=head_dims)
    if architecture.rope in _BY_KIND and architecture.rope != "gemma4":
        new, old = config.section("rope_parameters"), config.section("rope_scaling")
        if architecture.rope == "mellum" and new.raw:
            _refuse_missing(new, is_sliding)
        _refuse_unknown(new, {"full_attention", "sliding_attention"})
        # transformers, Gemma3TextConfig and Olmo3Config: only full-attention layers use the extended context
        whole = Fields(dict(new.section("full_attention").raw) | dict(old.raw), config.where)
        near = new.section("sliding_attention")
        # transformers, Olmo3Config: rope_theta is that of full-attention layers
        near_theta = {"olmo3": 5e5, "mellum": 1e4}.get(architecture.rope)
        if near_theta is None:
            near_theta = config.positive("rope_local_base_freq")
        rope = _parse(whole, config, shape, theta=config.positive("rope_theta", default=5e5))
        local = _parse(near, config, shape, theta=near_theta)
        return tuple(local if slides else rope for slides in is_sliding)
    fields = rope_section(config)
    if any(isinstance(value, Mapping) for value in fields.raw.values()):
        raise ModelError(f"{config.where}: rope_parameters per layer type ({', '.join(fields.raw)}) are not supported")
    rope = _parse(fields, config, shape, theta=config.positive("rope_theta", default=1e4))
    return tuple(rope if rotates else None for rotates in has_rope)


def _parse_by_kind(
    config: Fields, shape: _Shape, *, is_sliding: Sequence[bool], head_dims: Sequence[int]
) -> tuple[RopeConfig, ...]:
    """Read the object of each kind of layer in rope_parameters; layers of a kind may have heads of several sizes."""
    sections = config.section("rope_parameters")
    if config.get("rope_parameters") is None:  # null is the class's default
        sections = Fields(shape.architecture.defaults["rope_parameters"], config.where)
    _refuse_missing(sections, is_sliding)
    _refuse_unknown(sections, {"full_attention", "sliding_attention"})
    ropes: dict[tuple[bool, int], RopeConfig] = {}
    for slides, head_dim in zip(is_sliding, head_dims, strict=True):
        if (slides, head_dim) not in ropes:
            fields = sections.section("sliding_attention" if slides else "full_attention")
            rope = _parse(fields, config, replace(shape, head_dim=head_dim), theta=1e4 if slides else 1e6)
            if rope.type == "default" and rope.partial_rotary_factor != 1:  # transformers rotates the whole head then
                raise ModelError(f"{config.where}: partial_rotary_factor is not supported for rope type 'default' here")
            ropes[slides, head_dim] = rope
    return tuple(ropes[key] for key in zip(is_sliding, head_dims, strict=True))


def rope_section(config: Fields) -> Fields:
    """Return the object with the rotary fields; as in transformers, the old spelling wins."""
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    return old if old.raw else new


def find_context_len(ropes: Sequence[RopeConfig | None], architecture: Architecture, max_positions: int) -> int:
    """Return the number of tokens that the positions of all layers cover."""
    if architecture.rope in ("gemma3", "gemma4"):  # their configs state the extended length for every rope type
        return max_positions
    return max((rope.reach(max_positions) for rope in ropes if rope is not None), default=max_positions)


@dataclass(frozen=True)
class _Shape:
    """Sizes elsewhere in the config that the rotary part depends on."""

    architecture: Architecture
    head_dim: int
    max_position_embeddings: int


def _parse(fields: Fields, config: Fields, shape: _Shape, *, theta: float) -> RopeConfig:
    """Read one layer type's rope. fields: its own object; config: the whole file; theta: default base."""
    own: Mapping[str, tuple[str, ...]] = {"hunyuan": ("alpha",), "phimoe": ("short_mscale", "long_mscale")}
    growth = ("llama_4_scaling_beta",) if shape.architecture.multipliers == "ministral3" else ()
    _refuse_unknown(fields, {*_KNOWN.split(), *_HARMLESS, *growth, *own.get(shape.architecture.rope, ())})
    config.pass_over("original_max_position_embeddings")
    theta = fields.positive("rope_theta", default=theta)
    partial = _partial_rotary_factor(fields, config, shape)
    rope_type = _rope_type(fields, shape.architecture)
    if rope_type == "yarn" and shape.architecture.rope in _BY_KIND and not fields.flag("truncate", default=True):
        # transformers does not look for it within the object of a kind of layers
        raise ModelError(f"{config.where}: truncate False is not supported in rope_parameters of a kind of layers")
    if rope_type == "dynamic" and shape.architecture.rope == "hunyuan" and fields.get("alpha"):
        theta *= _ntk_factor(fields.positive("alpha"), shape.head_dim, config.where)
        rope_type = "default"
    if rope_type == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=partial)
    if shape.architecture.rope == "phimoe" and rope_type != "longrope":
        raise ModelError(f"{config.where}: rope type {rope_type!r} is not supported for this architecture")
    max_positions = shape.max_position_embeddings
    if rope_type == "dynamic":  # transformers always extends from max_position_embeddings
        original = max_positions
    else:
        original = fields.count("original_max_position_embeddings", default=max_positions)
        # Phi-3 has it beside the object, and that value wins (transformers, standardize_rope_params)
        original = config.count("original_max_position_embeddings", default=original)
    # yarn and longrope may omit the factor; it is then this ratio (transformers, _compute_yarn_parameters)
    default_factor = max_positions / original if rope_type in ("yarn", "longrope") else None
    default_factor = 1.0 if rope_type == "proportional" else default_factor
    rope = RopeConfig(
        theta=theta,
        type=rope_type,
        factor=fields.number("factor", default=default_factor),
        partial_rotary_factor=partial,
        original_max_position_embeddings=original,
        low_freq_factor=fields.number("low_freq_factor", default=1.0),
        high_freq_factor=fields.number("high_freq_factor", default=4.0),
        attention_factor=None if fields.get("attention_factor") is None else fields.number("attention_factor"),
        mscale=fields.number("mscale", default=0.0),
        mscale_all_dim=fields.number("mscale_all_dim", default=0.0),
        beta_fast=_turns(fields, "beta_fast", rope_type, default=32.0),
        beta_slow=_turns(fields, "beta_slow", rope_type, default=1.0),
        truncate=fields.flag("truncate", default=True),
        short_factors=_pair_factors(fields, "short_factor", rope_type, partial, shape),
        long_factors=_pair_factors(fields, "long_factor", rope_type, partial, shape),
        short_mscale=fields.positive("short_mscale") if shape.architecture.rope == "phimoe" else None,
        long_mscale=fields.positive("long_mscale") if shape.architecture.rope == "phimoe" else None,
    )
    if not 1 <= rope.factor * max_positions <= MAX_COUNT:
        raise ModelError(
            f"{config.where}: rope factor {rope.factor!r} times {max_positions} positions is not from 1 to {MAX_COUNT}"
        )
    if rope_type == "dynamic" and rope.rotary_dim(shape.head_dim) <= 2:
        raise ModelError(f"{config.where}: dynamic rope needs more than one rotated pair per head")
    return rope


def _turns(fields: Fields, name: str, rope_type: str, *, default: float) -> float:
    """Return an end of yarn's ramp, in turns over the original context; 0 is the default (transformers)."""
    turns = fields.number(name, default=default) or default
    if rope_type == "yarn" and not 1 / MAX_COUNT <= turns <= MAX_COUNT:  # 1e308 has no wavelength
        raise ModelError(f"{fields.where}: {name} {turns!r} is not from 1/{MAX_COUNT} to {MAX_COUNT} turns")
    return turns


def _ntk_factor(alpha: float, head_dim: int, where: str) -> float:
    """Return the factor on the base that is fixed by alpha, whatever the length (transformers, HunYuanDenseV1)."""
    if head_dim <= 2:
        raise ModelError(f"{where}: alpha of a dynamic rope needs more than one rotated pair per head")
    try:
        return float(alpha ** (head_dim / (head_dim - 2)))
    except OverflowError:
        raise ModelError(f"{where}: alpha {alpha!r} of a dynamic rope is too large") from None


def _refuse_missing(sections: Fields, is_sliding: Sequence[bool]) -> None:
    """Raise ModelError if a kind of layers has no entry in rope_parameters."""
    for kind in dict.fromkeys("sliding_attention" if slides else "full_attention" for slides in is_sliding):
        if sections.get(kind) is None:
            raise ModelError(f"{sections.where}: rope_parameters has no entry {kind!r}, as layers need")


def _refuse_unknown(fields: Fields, known: Set[str]) -> None:
    for name, value in fields.raw.items():
        if value is not None and name not in known:
            raise ModelError(f"{fields.where}: {name} {value!r} is not supported among the fields of rotary positions")


def _rope_type(fields: Fields, architecture: Architecture) -> RopeType:
    name = fields.get("rope_type") or fields.get("type") or "default"
    if architecture.rope == "phi3" and name in ("su", "yarn"):  # old Phi-3 checkpoints use these names for longrope
        name = "longrope"
    if architecture.rope == "qwen2_vl" and name == "mrope":  # positions on three axes, which are equal for text
        name = "default"
    if name not in ROPE_TYPES:
        raise ModelError(f"{fields.where}: rope type {name!r} is not supported: supported are {', '.join(ROPE_TYPES)}")
    return name


def _partial_rotary_factor(fields: Fields, config: Fields, shape: _Shape) -> float:
    default = 1.0
    if shape.architecture.rope == "minimax" and config.get("rotary_dim") is not None:
        default = config.count("rotary_dim") / shape.head_dim
    factor = fields.positive("partial_rotary_factor", default=config.positive("partial_rotary_factor", default=default))
    if factor > 2:  # one of 1e308 has no number of dimensions to name
        raise ModelError(f"{config.where}: partial_rotary_factor {factor!r} is not supported: a share is at most 1")
    if shape.architecture.rope == "mistral4":  # the share of the whole head, of which head_dim is the rotated part
        whole = config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim")
        if config.get("head_dim") not in (None, whole):  # transformers would rotate a share of this one
            raise ModelError(
                f"{config.where}: head_dim {config.get('head_dim')!r} is not supported: served is {whole}, the sum of"
                " qk_nope_head_dim and qk_rope_head_dim"
            )
        if fields.get("partial_rotary_factor") is not None and int(whole * factor) != shape.head_dim:
            raise ModelError(
                f"{config.where}: partial_rotary_factor {factor!r} would rotate {int(whole * factor)} of {whole}"
                f" dimensions, but qk_rope_head_dim is {shape.head_dim}"
            )
        return 1.0
    if factor != 1 and shape.architecture.rope not in ("phi3", "glm", "gemma4", "minimax"):
        raise ModelError(f"{config.where}: partial_rotary_factor {factor!r} is not supported for this architecture")
    rotary_dim = int(shape.head_dim * factor)
    if factor > 1 or rotary_dim == 0 or rotary_dim % 2 != 0:
        raise ModelError(
            f"{config.where}: partial_rotary_factor {factor!r} would rotate {rotary_dim} of {shape.head_dim} dimensions"
        )
    return factor


def _pair_factors(fields: Fields, name: str, rope_type: str, partial: float, shape: _Shape) -> tuple[float, ...]:
    if rope_type != "longrope":
        return ()
    return fields.positives(name, length=int(shape.head_dim * partial) // 2)
