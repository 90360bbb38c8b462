"""ARCHITECTURES: the supported architectures, and their differences from the common reading of a config.json.

A new model is one file and one row here. A model's file is imported only when the model is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from models.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """One row: the model's factory, and the settings its transformers class fixes instead of reading config.json."""

    target: str  # "module:name" of the factory: models.layers.causal_lm.CausalLM with the family's layers
    model_type: str  # transformers' name of the config class: of the text part's, if there is one
    # q, k and v have a bias: as the config's attention_bias or qkv_bias says, or fixed by the architecture
    qkv_bias: Literal["config", "qkv_bias"] | bool
    # the output projection has a bias if attention_bias is true
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    # RMS norm of queries and keys before RoPE: of each head, or over the width of all heads
    qk_norm: Literal["none", "head", "width"] = "none"
    # variant of the RMS norm: see models/layers/norm.py
    norm: Literal["llama", "olmo2", "gemma"] = "llama"
    num_layer_norms: int = 2  # norms over hidden_size in each layer
    # "legacy_gelu_tanh": the name "gelu" means the tanh approximation too
    activation: Literal["silu", "gelu_tanh", "legacy_gelu_tanh"] = "silu"
    # models/config/layers.py: the constants in the config
    multipliers: Literal["llama", "granite", "gemma", "gemma2", "gemma3", "ministral3"] = "llama"
    # models/config/layers.py: no layer slides, all do, those in layer_types do, or those by a rule
    sliding_layers: Literal[
        "none", "every", "every_if_used", "max_window_layers", "odd_until_max", "nope", "alternating", "pattern"
    ] = "none"
    # models/config/layers.py: the spelling of the mixture-of-experts fields
    experts: Literal["none", "mixtral", "qwen2", "qwen3"] = "none"
    # models/config/rope.py: the spelling of the rotary fields
    rope: Literal["llama", "smollm3", "phi3", "gemma3"] = "llama"
    # fields that a config may omit: the default of its transformers class, where it is not that of models/config
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # models/config/unread_fields.py: fields of its config class that change nothing, and those that must have a value
    harmless: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # multimodal models: location of the text part in config and checkpoint, and the prefixes that are not read
    text_config: str | None = None
    # rows of text parts with another model_type that it may have instead; the factory is the same
    other_text_parts: tuple[Architecture, ...] = ()
    text_prefix: str | None = None
    ignored_prefixes: tuple[str, ...] = ()
    # projections that checkpoints store merged, and their parts
    packed_modules: Mapping[str, str] = field(default_factory=dict)
    has_lm_head: bool = True  # False: the model returns hidden states only


def _text_part_of(architecture: Architecture, *others: Architecture) -> Architecture:
    """Return the row of a multimodal model with this text part, in the layout of transformers' save_pretrained.

    others: text parts that it may have instead.
    """
    return dataclasses.replace(
        architecture,
        text_config="text_config",
        other_text_parts=others,
        text_prefix="language_model",
        ignored_prefixes=("vision_tower.", "multi_modal_projector."),
    )


_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_MISTRAL = Architecture(
    "models.llama:Llama",
    "mistral",
    qkv_bias=False,
    sliding_layers="every",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
# Mistral whose queries grow with their position beyond the original length, as Llama 4's
_MINISTRAL3 = Architecture(
    "models.llama:Llama",
    "ministral3",
    qkv_bias=False,
    sliding_layers="every",
    multipliers="ministral3",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
_GEMMA3 = Architecture(
    "models.gemma:Gemma",
    "gemma3_text",
    qkv_bias="config",
    has_output_bias=True,
    qk_norm="head",
    norm="gemma",
    num_layer_norms=4,
    activation="gelu_tanh",
    multipliers="gemma3",
    sliding_layers="pattern",
    rope="gemma3",
    defaults=_GEMMA3_DEFAULTS,
    harmless=("attn_logit_softcapping",),  # transformers' class has it, but its model does not apply it
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "models.llama:Llama", "llama", qkv_bias="config", has_output_bias=True, has_mlp_bias=True
    ),
    "MistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Mistral3ForConditionalGeneration": _text_part_of(_MISTRAL, _MINISTRAL3),
    "Qwen2ForCausalLM": Architecture(
        "models.llama:Llama",
        "qwen2",
        qkv_bias=True,
        sliding_layers="max_window_layers",
        defaults={"sliding_window": 4096, "num_key_value_heads": 32},
    ),
    "Qwen3ForCausalLM": Architecture(
        "models.qwen3:Qwen3",
        "qwen3",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="head",
        sliding_layers="max_window_layers",
        defaults={"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "MixtralForCausalLM": Architecture(
        "models.mixtral:Mixtral",
        "mixtral",
        qkv_bias=False,
        sliding_layers="every",
        experts="mixtral",
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "models.llama:Llama",
        "qwen2_moe",
        qkv_bias="qkv_bias",
        sliding_layers="odd_until_max",
        experts="qwen2",
        defaults={"qkv_bias": True, "sliding_window": 4096, "num_key_value_heads": 16},
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "models.qwen3:Qwen3",
        "qwen3_moe",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="head",
        sliding_layers="every_if_used",
        experts="qwen3",
        defaults={"sliding_window": 4096, "num_key_value_heads": 4},
    ),
    "SmolLM3ForCausalLM": Architecture(
        "models.llama:Llama",
        "smollm3",
        qkv_bias="config",
        has_output_bias=True,
        has_mlp_bias=True,
        sliding_layers="nope",
        rope="smollm3",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "num_key_value_heads": 4},
    ),
    "Phi3ForCausalLM": Architecture(
        "models.phi3:Phi3",
        "phi3",
        qkv_bias=False,
        sliding_layers="every",
        rope="phi3",
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        packed_modules={
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            "gate_proj": "gate_up_proj",
            "up_proj": "gate_up_proj",
        },
    ),
    "GraniteForCausalLM": Architecture(
        "models.granite:Granite",
        "granite",
        qkv_bias="config",
        has_output_bias=True,
        has_mlp_bias=True,
        multipliers="granite",
    ),
    "Olmo2ForCausalLM": Architecture(
        "models.olmo2:Olmo2",
        "olmo2",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="width",
        norm="olmo2",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "GemmaForCausalLM": Architecture(
        "models.llama:Llama",
        "gemma",
        qkv_bias="config",
        has_output_bias=True,
        norm="gemma",
        activation="legacy_gelu_tanh",
        multipliers="gemma",
        defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True},
    ),
    "Gemma2ForCausalLM": Architecture(
        "models.gemma:Gemma",
        "gemma2",
        qkv_bias="config",
        has_output_bias=True,
        norm="gemma",
        num_layer_norms=4,
        activation="gelu_tanh",
        multipliers="gemma2",
        sliding_layers="alternating",
        harmless=("sliding_window_size",),  # sliding_window's older name, beside it in published configs
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    # its transformers class does not cap the logits
    "Gemma3ForConditionalGeneration": dataclasses.replace(
        _text_part_of(_GEMMA3), neutral={"final_logit_softcapping": ()}
    ),
}


def find_architecture(name: str) -> Architecture:
    """Return an architecture's row; XModel is XForCausalLM without head. Raises ModelError listing supported names."""
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    if name.endswith("Model") and whole in ARCHITECTURES:
        return dataclasses.replace(ARCHITECTURES[whole], has_lm_head=False)
    if name not in ARCHITECTURES:
        raise ModelError(f"architecture {name!r} is not supported: supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
