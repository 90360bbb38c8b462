"""Layer patterns and constant multipliers of a config.json.

plan_layers returns what each layer keeps and where its attention reaches, one entry per layer. Multipliers holds the
constants by which some architectures multiply or cap activations.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from models.architecture import Architecture
from models.config.gemma4 import find_layer_caches
from models.config.latent import LatentConfig
from models.config.layer_cache import LayerCache
from models.config.layer_state import LayerState
from models.config.mamba2 import read_multipliers
from models.config.recurrence import RecurrenceConfig, find_mixers, parse_recurrence
from models.config.rope import RopeConfig, find_context_len, parse_ropes, rope_section
from models.config.sparse_layers import num_dense_layers, read_sparse_kinds
from models.errors import ModelError
from models.fields import Fields

# By these rules some layers slide, whatever the window is
_ALWAYS_SLIDING = ("alternating", "pattern", "pattern_and_last", "three_of_four", "dense_prefix")
# These rules apply only if use_sliding_window is true
_OPTIONAL = ("every_if_used", "max_window_layers", "odd_until_max", "nope")


@dataclass(frozen=True)
class LayerPlan:
    """What each layer keeps of a request, and its positions; one entry per layer, None: nothing."""

    recurrence: RecurrenceConfig | None
    caches: tuple[LayerCache | None, ...]
    states: tuple[LayerState | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    max_context_len: int  # that the positions of all layers cover


def plan_layers(
    config: Fields,
    architecture: Architecture,
    num_layers: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    latent: LatentConfig | None,
) -> LayerPlan:
    """Read what each layer is. num_kv_heads, head_dim: where layers do not state their own. Raises ModelError."""
    max_positions = config.count("max_position_embeddings")
    recurrence, mixers = parse_recurrence(config, architecture), find_mixers(config, architecture, num_layers)
    attends = [mixer in ("attention", "both") for mixer in mixers]
    has_rope = find_rope_layers(config, architecture, num_layers)
    is_sliding = find_sliding_layers(config, architecture, has_rope)
    has_rope = limit_rope_layers(config, architecture, has_rope, is_sliding)
    if architecture.layers == "gemma4":
        caches = find_layer_caches(
            config, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, is_sliding=is_sliding
        )
    else:
        cache = LayerCache(num_kv_heads, head_dim, head_dim) if latent is None else latent.layer_cache
        caches = (cache,) * num_layers
    ropes = parse_ropes(
        config,
        architecture,
        has_rope=[rotates and attending for rotates, attending in zip(has_rope, attends, strict=True)],
        is_sliding=is_sliding,
        head_dims=[cache.rotated_dim for cache in caches],
        max_position_embeddings=max_positions,
    )
    max_context_len = find_context_len(ropes, architecture, max_positions)
    windows = find_windows(config, architecture, is_sliding, max_context_len=max_context_len)
    chunks = find_chunks(config, architecture, has_rope, max_context_len=max_context_len)
    state = None if recurrence is None else recurrence.layer_state
    return LayerPlan(
        recurrence,
        caches=tuple(
            dataclasses.replace(cache, window=window, chunk=chunk) if attending else None
            for cache, window, chunk, attending in zip(caches, windows, chunks, attends, strict=True)
        ),
        states=tuple(state if mixer in ("recurrent", "both") else None for mixer in mixers),
        ropes=ropes,
        max_context_len=max_context_len,
    )


def find_rope_layers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with rotary positions: all, but for the rule of SmolLM3Config and Llama4TextConfig.

    No layer of OLMo-Hybrid has them if rope_theta is given as null; none of Nemotron-H and Kimi-Linear ever.
    """
    if architecture.rope == "olmo_hybrid":
        section = rope_section(config).raw
        given = section if "rope_theta" in section else config.raw
        return ("rope_theta" not in given or given["rope_theta"] is not None,) * num_layers
    if architecture.recurrence in ("nemotron", "kimi_linear"):
        return (False,) * num_layers
    if architecture.recurrence == "granite":
        return (_has_positions(config),) * num_layers
    if architecture.rope not in ("smollm3", "llama4"):
        return (True,) * num_layers
    has_rope = config.get("no_rope_layers")  # 1: the layer has rotary positions
    config.pass_over("no_rope_layer_interval")
    if has_rope is None or (architecture.rope == "llama4" and has_rope == []):
        interval = config.count("no_rope_layer_interval", default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(has_rope, list) or len(has_rope) < num_layers or not all(value in (0, 1) for value in has_rope):
        raise ModelError(
            f"{config.where}: no_rope_layers must be a list of 0 and 1 for {num_layers} layers, found {has_rope!r}"
        )
    return tuple(bool(value) for value in has_rope[:num_layers])


def _has_positions(config: Fields) -> bool:
    """Return whether Granite 4 has rotary positions."""
    kind = config.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise ModelError(
            f"{config.where}: position_embedding_type {kind!r} is not supported: served are 'rope' and 'nope'"
        )
    return bool(kind == "rope")


def find_sliding_layers(config: Fields, architecture: Architecture, has_rope: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return True for each layer that attends to sliding_window tokens only."""
    num_layers = len(has_rope)
    if architecture.recurrence != "none":  # layer_types are read by models/config/recurrence.py
        return (False,) * num_layers
    rule = architecture.sliding_layers
    is_used = rule != "none" and (rule not in _OPTIONAL or config.flag("use_sliding_window"))
    if rule in _OPTIONAL:
        config.pass_over("sliding_window", "max_window_layers")
    if rule == "every" and config.get("use_sliding_window") is False and config.get("sliding_window") is not None:
        raise ModelError(
            f"{config.where}: use_sliding_window false is not supported: set sliding_window to null instead"
        )
    if rule == "chunked":
        return (False,) * num_layers
    if rule == "attention_types":
        return _refuse_linear_layers(config, num_layers)
    if rule == "above_max_window_layers" and config.get("sliding_window") is None:
        config.pass_over("max_window_layers")
        _refuse_mixed_layers(config, num_layers, slides=False)
        return (False,) * num_layers
    if not is_used or rule in ("every", "every_if_used"):
        _refuse_mixed_layers(config, num_layers, slides=is_used and config.get("sliding_window") is not None)
        return (is_used,) * num_layers
    layer_types = config.get("layer_types")
    if rule == "listed_or_none":
        config.pass_over("sliding_window")
    if layer_types is not None:
        if rule in ("pattern", "pattern_and_last", "letters", "dense_prefix"):
            config.pass_over("sliding_window_pattern", "prefix_dense_sliding_window_pattern")
        if rule == "above_max_window_layers":
            config.pass_over("max_window_layers")
        is_sliding = _read_layer_types(layer_types, num_layers, config.where)
        # transformers, Gemma4TextConfig: the last layer has full attention whatever is said
        return (*is_sliding[:-1], False) if rule == "pattern_and_last" else is_sliding
    if rule in ("max_window_layers", "above_max_window_layers", "odd_until_max"):
        border = config.get("max_window_layers")
        border = 28 if border is None else border
        if isinstance(border, bool) or not isinstance(border, int):
            raise ModelError(f"{config.where}: max_window_layers must be an integer, found {border!r}")
        if rule == "odd_until_max":  # transformers' Qwen2MoeConfig, unlike its Qwen2Config; "odd" counts from 1
            return tuple(layer % 2 == 0 and layer < border for layer in range(num_layers))
        return tuple(layer >= border for layer in range(num_layers))
    if rule == "nope":
        return tuple(not rotates for rotates in has_rope)
    if rule in ("listed_or_every", "listed_or_none"):
        return (rule == "listed_or_every",) * num_layers
    if rule == "letters":
        return _read_pattern(config, num_layers)
    if rule == "dense_prefix":
        return _read_prefix(config, num_layers)
    periods = {"alternating": 2, "three_of_four": 4}
    period = periods[rule] if rule in periods else config.count("sliding_window_pattern")
    is_sliding = tuple((layer + 1) % period != 0 for layer in range(num_layers))
    return (*is_sliding[:-1], False) if rule == "pattern_and_last" else is_sliding


def _read_pattern(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Read a period or letters, L: sliding, G: full, which repeat; the last layer is then full (Exaone4Config)."""
    config.pass_over("sliding_window_pattern")
    if config.get("sliding_window") is None:
        return (False,) * num_layers
    pattern = config.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        period = config.count("sliding_window_pattern")
        return tuple((layer + 1) % period != 0 for layer in range(num_layers))
    if not pattern or set(pattern) - {"L", "G"}:
        raise ModelError(
            f"{config.where}: sliding_window_pattern must be a number or of the letters L and G, found {pattern!r}"
        )
    return tuple(pattern[i % len(pattern)] == "L" and i < num_layers - 1 for i in range(num_layers))


def _read_prefix(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Read the periods of the first layers, without experts, and of the others (transformers, Cohere2MoeConfig)."""
    num_dense = min(num_dense_layers(config), num_layers)
    first, rest = config.count("prefix_dense_sliding_window_pattern"), config.count("sliding_window_pattern")
    return tuple(
        (layer + 1) % first != 0 if layer < num_dense else (layer - num_dense + 1) % rest != 0
        for layer in range(num_layers)
    )


def _refuse_linear_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Raise ModelError if attn_type_list has another kind than 1, attention; MiniMax-Text-01 has others."""
    kinds = config.get("attn_type_list")
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if kinds is not None and not (is_list and set(map(repr, kinds)) == {"1"}):
        raise ModelError(
            f"{config.where}: attn_type_list must be a list of 1 (attention) for {num_layers} layers, found {kinds!r}"
        )
    return (False,) * num_layers


def limit_rope_layers(
    config: Fields, architecture: Architecture, has_rope: tuple[bool, ...], is_sliding: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Return has_rope without the full-attention layers of architectures that rotate in sliding layers only."""
    if architecture.rope_layers == "all":
        return has_rope
    if architecture.rope_layers == "sliding_or_all" and config.get("sliding_window") is None:
        return has_rope
    if architecture.rope_layers == "sliding_or_dense" and config.count("prefix_dense_sliding_window_pattern") == 1:
        is_sparse = read_sparse_kinds(config, len(has_rope))
        return tuple(slides or not sparse for slides, sparse in zip(is_sliding, is_sparse, strict=True))
    return is_sliding


def find_windows(
    config: Fields, architecture: Architecture, is_sliding: tuple[bool, ...], *, max_context_len: int
) -> tuple[int | None, ...]:
    """Return each layer's window in tokens; None where the window is at least the context length.

    Raises ModelError if layers must slide and have no window.
    """
    if any(is_sliding) and config.get("sliding_window") is None:
        if config.get("layer_types") is not None and architecture.sliding_layers not in ("every", "every_if_used"):
            raise ModelError(f"{config.where}: layer_types has 'sliding_attention', but sliding_window is null")
        if architecture.sliding_layers in _ALWAYS_SLIDING:
            raise ModelError(f"{config.where}: sliding_window is null, but without layer_types some layers slide")
        return (None,) * len(is_sliding)
    if not any(is_sliding):
        return (None,) * len(is_sliding)
    window = config.count("sliding_window")
    if window >= max_context_len:
        return (None,) * len(is_sliding)
    return tuple(window if slides else None for slides in is_sliding)


def find_chunks(
    config: Fields, architecture: Architecture, has_rope: tuple[bool, ...], *, max_context_len: int
) -> tuple[int | None, ...]:
    """Return each layer's chunk in tokens; None where it is at least the context length, or attention is full.

    Chunked are the layers that layer_types names, else those with rotary positions.
    """
    num_layers = len(has_rope)
    if architecture.sliding_layers != "chunked":
        return (None,) * num_layers
    layer_types, is_chunked = config.get("layer_types"), has_rope
    if layer_types is not None:
        is_chunked = _read_layer_types(layer_types, num_layers, config.where, other="chunked_attention")
    if not any(is_chunked):
        config.pass_over("attention_chunk_size")
        return (None,) * num_layers
    if config.get("attention_chunk_size") is None:
        which = (
            "no_rope_layers has layers with positions" if layer_types is None else "layer_types has chunked_attention"
        )
        raise ModelError(f"{config.where}: {which}, which attend by chunks, but attention_chunk_size is null")
    chunk = config.count("attention_chunk_size")
    return tuple(chunk if chunked and chunk < max_context_len else None for chunked in is_chunked)


def _refuse_mixed_layers(config: Fields, num_layers: int, *, slides: bool) -> None:
    """Raise ModelError if layer_types differs from what all layers of this architecture are."""
    layer_types = config.get("layer_types")
    if layer_types is not None and set(_read_layer_types(layer_types, num_layers, config.where)) != {slides}:
        kind = "sliding_attention" if slides else "full_attention"
        raise ModelError(f"{config.where}: layer_types is not supported: served is {kind!r}, found {layer_types!r}")


def _read_layer_types(
    layer_types: object, num_layers: int, where: str, other: str = "sliding_attention"
) -> tuple[bool, ...]:
    """Return True for each layer of the kind `other`, False for full attention."""
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ModelError(f"{where}: layer_types must be a list of names, found {layer_types!r}")
    if len(layer_types) != num_layers:
        raise ModelError(f"{where}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    unknown = sorted(set(layer_types) - {"full_attention", other})
    if unknown:
        raise ModelError(f"{where}: layer_types {unknown} are not supported: served are 'full_attention' and {other!r}")
    return tuple(kind == other for kind in layer_types)


@dataclass(frozen=True)
class Multipliers:
    """Constants of an architecture. The default 1 (for a cap: 0) leaves values unchanged."""

    attention: float  # multiplies the products of queries and keys
    embedding: float = 1.0
    residual: float = 1.0  # multiplies the outputs of attention and MLP before the residual addition
    logits: float = 1.0
    logits_divisor: float = 1.0
    attention_softcap: float = 0.0  # cap * tanh(x / cap), after the scale
    logits_softcap: float = 0.0
    # Falcon-H1's: of attention's input and output, a recurrence's output, the MLP's gate before its activation
    attention_input: float = 1.0
    attention_output: float = 1.0
    recurrence_output: float = 1.0
    mlp_gate: float = 1.0
    mlp_output: float = 1.0
    rounds_embedding: bool = True  # the embedding's constant is rounded to the model's dtype before the product
    # Rotated queries are multiplied by 1 + query_growth * ln(1 + (position + query_growth_offset) // …_length)
    query_growth: float = 0.0
    query_growth_length: int = 1
    query_growth_offset: int = 0
    rounds_query_growth: bool = True  # the factor is rounded to the model's dtype before the product


def parse_multipliers(config: Fields, architecture: Architecture, *, hidden_size: int, head_dim: int) -> Multipliers:
    """Read the constants that this architecture has. Raises ModelError."""
    kind = architecture.multipliers
    if kind == "falcon":
        gate, output = read_multipliers(config, "mlp_multipliers", length=2)
        return Multipliers(
            # as if keys were multiplied
            attention=head_dim**-0.5 * config.positive("key_multiplier", default=1.0),
            embedding=config.positive("embedding_multiplier", default=1.0),
            logits=config.positive("lm_head_multiplier", default=1.0),
            attention_input=config.positive("attention_in_multiplier", default=1.0),
            attention_output=config.positive("attention_out_multiplier", default=1.0),
            recurrence_output=config.positive("ssm_out_multiplier", default=1.0),
            mlp_gate=gate,
            mlp_output=output,
            rounds_embedding=False,
        )
    if kind == "granite":
        if config.get("attention_multiplier") is None and "attention_multiplier" in config.raw:
            # transformers' attentions disagree: eager fails, sdpa takes head_dim ** -0.5 instead of the class's default
            raise ModelError(f"{config.where}: attention_multiplier None is not supported: served are positive numbers")
        return Multipliers(
            attention=config.positive("attention_multiplier", default=1.0),
            embedding=config.positive("embedding_multiplier", default=1.0),
            residual=config.positive("residual_multiplier", default=1.0),
            logits_divisor=config.positive("logits_scaling", default=1.0),
        )
    if kind == "gemma4":
        softcap = config.number("final_logit_softcapping", default=0.0)
        return Multipliers(attention=1.0, embedding=hidden_size**0.5, logits_softcap=softcap)
    if kind == "gemma":
        return Multipliers(attention=head_dim**-0.5, embedding=hidden_size**0.5)
    if kind in ("gemma2", "gemma3"):
        return Multipliers(
            attention=config.positive("query_pre_attn_scalar") ** -0.5,
            embedding=hidden_size**0.5,
            attention_softcap=config.number("attn_logit_softcapping", default=0.0) if kind == "gemma2" else 0.0,
            logits_softcap=config.number("final_logit_softcapping", default=0.0),
        )
    if kind == "llama4":
        is_tuned = config.get("attn_temperature_tuning")  # a number in published files
        if is_tuned is not None and not isinstance(is_tuned, int):
            raise ModelError(
                f"{config.where}: attn_temperature_tuning must be true, false or a whole number, found {is_tuned!r}"
            )
        growth, length = config.number("attn_scale", default=0.1), config.count("floor_scale", default=8192)
        return Multipliers(
            attention=head_dim**-0.5,
            query_growth=0.0 if is_tuned is not None and not is_tuned else growth,
            query_growth_length=length,
            query_growth_offset=1,
            rounds_query_growth=False,
        )
    if kind == "cohere2":
        return Multipliers(attention=head_dim**-0.5, logits=config.positive("logit_scale", default=0.0625))
    if kind == "ministral3":
        rope = rope_section(config)
        growth = rope.number("llama_4_scaling_beta", default=0.0)
        length = rope.count("original_max_position_embeddings", default=config.count("max_position_embeddings"))
        return Multipliers(attention=head_dim**-0.5, query_growth=growth, query_growth_length=length)
    return Multipliers(attention=head_dim**-0.5)
