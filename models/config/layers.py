"""Layer patterns, constant multipliers and mixture-of-experts fields of a config.json.

find_rope_layers, find_sliding_layers and find_windows return one entry per layer: rotary positions or none, sliding
window or full attention, and the window's length. Multipliers holds the constants by which some architectures multiply
or cap activations. ExpertsConfig describes the mixture of experts that replaces the MLP in some layers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from models.config.rope import rope_section
from models.errors import ModelError
from models.fields import Fields
from models.quantization.config import QuantizationConfig
from models.registry import Architecture

# These rules apply only if use_sliding_window is true
_OPTIONAL = ("every_if_used", "max_window_layers", "odd_until_max", "nope")


def find_rope_layers(config: Fields, architecture: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with rotary positions: all, except by the rule of transformers' SmolLM3Config."""
    if architecture.rope != "smollm3":
        return (True,) * num_layers
    has_rope = config.get("no_rope_layers")  # 1: the layer has rotary positions
    config.pass_over("no_rope_layer_interval")
    if has_rope is None:
        interval = config.count("no_rope_layer_interval", default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(has_rope, list) or len(has_rope) < num_layers or not all(value in (0, 1) for value in has_rope):
        raise ModelError(
            f"{config.where}: no_rope_layers must be a list of 0 and 1 for {num_layers} layers, found {has_rope!r}"
        )
    return tuple(bool(value) for value in has_rope[:num_layers])


def find_sliding_layers(config: Fields, architecture: Architecture, has_rope: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return True for each layer that attends to sliding_window tokens only."""
    num_layers = len(has_rope)
    rule = architecture.sliding_layers
    is_used = rule != "none" and (rule not in _OPTIONAL or config.flag("use_sliding_window"))
    if rule in _OPTIONAL:
        config.pass_over("sliding_window", "max_window_layers")
    if rule == "every" and config.get("use_sliding_window") is False and config.get("sliding_window") is not None:
        raise ModelError(
            f"{config.where}: use_sliding_window false is not supported: set sliding_window to null instead"
        )
    if not is_used or rule in ("every", "every_if_used"):
        _refuse_mixed_layers(config, num_layers, slides=is_used and config.get("sliding_window") is not None)
        return (is_used,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is not None:
        config.pass_over("sliding_window_pattern")
        return _read_layer_types(layer_types, num_layers, config.where)
    if rule in ("max_window_layers", "odd_until_max"):
        border = config.get("max_window_layers")
        border = 28 if border is None else border
        if isinstance(border, bool) or not isinstance(border, int):
            raise ModelError(f"{config.where}: max_window_layers must be an integer, found {border!r}")
        if rule == "odd_until_max":  # transformers' Qwen2MoeConfig, unlike its Qwen2Config; "odd" counts from 1
            return tuple(layer % 2 == 0 and layer < border for layer in range(num_layers))
        return tuple(layer >= border for layer in range(num_layers))
    if rule == "nope":
        return tuple(not rotates for rotates in has_rope)
    period = 2 if rule == "alternating" else config.count("sliding_window_pattern")
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def find_windows(config: Fields, is_sliding: tuple[bool, ...], *, max_context_len: int) -> tuple[int | None, ...]:
    """Return each layer's window in tokens; None where the window is at least the context length."""
    if not any(is_sliding) or config.get("sliding_window") is None:
        return (None,) * len(is_sliding)
    window = config.count("sliding_window")
    if window >= max_context_len:
        return (None,) * len(is_sliding)
    return tuple(window if slides else None for slides in is_sliding)


def _refuse_mixed_layers(config: Fields, num_layers: int, *, slides: bool) -> None:
    """Raise ModelError if layer_types differs from what all layers of this architecture are."""
    layer_types = config.get("layer_types")
    if layer_types is not None and set(_read_layer_types(layer_types, num_layers, config.where)) != {slides}:
        kind = "sliding_attention" if slides else "full_attention"
        raise ModelError(f"{config.where}: layer_types is not supported: served is {kind!r}, found {layer_types!r}")


def _read_layer_types(layer_types: object, num_layers: int, where: str) -> tuple[bool, ...]:
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise ModelError(f"{where}: layer_types must be a list of names, found {layer_types!r}")
    if len(layer_types) != num_layers:
        raise ModelError(f"{where}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"{where}: layer_types {unknown} are not supported")
    return tuple(kind == "sliding_attention" for kind in layer_types)


@dataclass(frozen=True)
class Multipliers:
    """Constants of an architecture. The default 1 (for a cap: 0) leaves values unchanged."""

    attention: float  # multiplies the products of queries and keys
    embedding: float = 1.0
    residual: float = 1.0  # multiplies the outputs of attention and MLP before the residual addition
    logits_divisor: float = 1.0
    attention_softcap: float = 0.0  # cap * tanh(x / cap), after the scale
    logits_softcap: float = 0.0
    # Rotated queries are multiplied by 1 + query_growth * ln(1 + position // query_growth_length)
    query_growth: float = 0.0
    query_growth_length: int = 1


def parse_multipliers(config: Fields, architecture: Architecture, *, hidden_size: int, head_dim: int) -> Multipliers:
    """Read the constants that this architecture has. Raises ModelError."""
    kind = architecture.multipliers
    if kind == "granite":
        return Multipliers(
            attention=config.positive("attention_multiplier", default=1.0),
            embedding=config.positive("embedding_multiplier", default=1.0),
            residual=config.positive("residual_multiplier", default=1.0),
            logits_divisor=config.positive("logits_scaling", default=1.0),
        )
    if kind == "gemma":
        return Multipliers(attention=head_dim**-0.5, embedding=hidden_size**0.5)
    if kind in ("gemma2", "gemma3"):
        return Multipliers(
            attention=config.positive("query_pre_attn_scalar") ** -0.5,
            embedding=hidden_size**0.5,
            attention_softcap=config.number("attn_logit_softcapping", default=0.0) if kind == "gemma2" else 0.0,
            logits_softcap=config.number("final_logit_softcapping", default=0.0),
        )
    if kind == "ministral3":
        rope = rope_section(config)
        growth = rope.number("llama_4_scaling_beta", default=0.0)
        length = rope.count("original_max_position_embeddings", default=config.count("max_position_embeddings"))
        return Multipliers(attention=head_dim**-0.5, query_growth=growth, query_growth_length=length)
    return Multipliers(attention=head_dim**-0.5)


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts of one size; a router chooses some of them for each token."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of each expert
    norm_topk_prob: bool  # divide the chosen experts' probabilities by their sum
    rounds_weights: bool  # then round them to the model's dtype, as transformers does for some architectures
    shared_intermediate_size: int = 0  # width of an expert that every token uses, with its own gate; 0: none

    def count_parameters(self, hidden_size: int, num_experts: int) -> int:
        """Count the parameters of one layer's router, its shared expert and num_experts of its experts."""
        shared = self.shared_intermediate_size
        router = hidden_size * (self.num_experts + (shared > 0))
        return router + 3 * hidden_size * (num_experts * self.intermediate_size + shared)

    def share_of_rank(self, tp_size: int) -> ExpertsConfig:
        """Return the sizes that one of tp_size ranks holds. Used for arithmetic, never to build a model."""
        return dataclasses.replace(
            self,
            intermediate_size=self.intermediate_size // tp_size,
            shared_intermediate_size=self.shared_intermediate_size // tp_size,
        )


def parse_experts(
    config: Fields, architecture: Architecture, num_layers: int, quantization: QuantizationConfig | None
) -> tuple[ExpertsConfig | None, tuple[bool, ...]]:
    """Return the experts (None if there are none) and True for each layer that has them.

    Raises ModelError, also if the experts are quantised.
    """
    kind = architecture.experts
    if kind == "none":
        return None, (False,) * num_layers
    # transformers 5 saves both under the newer name
    count = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    config.pass_over("num_experts")
    experts = ExpertsConfig(
        num_experts=config.count(count),
        num_experts_per_tok=config.count("num_experts_per_tok"),
        intermediate_size=config.count("intermediate_size" if kind == "mixtral" else "moe_intermediate_size"),
        norm_topk_prob=kind == "mixtral" or config.flag("norm_topk_prob"),
        rounds_weights=kind != "mixtral",
        shared_intermediate_size=config.count("shared_expert_intermediate_size") if kind == "qwen2" else 0,
    )
    if experts.num_experts_per_tok > experts.num_experts:
        raise ModelError(
            f"{config.where}: num_experts_per_tok {experts.num_experts_per_tok} is more than"
            f" {count} {experts.num_experts}"
        )
    is_sparse = (True,) * num_layers if kind == "mixtral" else _sparse_layers(config, num_layers)
    expert = "block_sparse_moe.experts.0.w1" if kind == "mixtral" else "mlp.experts.0.gate_proj"
    sparse = [layer for layer in range(num_layers) if is_sparse[layer]]
    if quantization is not None and any(quantization.scheme_of(f"model.layers.{i}.{expert}") for i in sparse):
        raise ModelError(
            f"{config.where}: its experts are quantized ({quantization.name}), and experts are served unquantized only:"
            " use the bf16 checkpoint"
        )
    return (experts if sparse else None), is_sparse


def _sparse_layers(config: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts, by the rule of transformers' Qwen2MoeDecoderLayer."""
    step = config.count("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise ModelError(f"{config.where}: mlp_only_layers must be a list of layer indices, found {dense!r}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
