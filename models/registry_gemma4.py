"""Rows of Gemma 4: its text, alone and within the models that also see and hear."""

from __future__ import annotations

import dataclasses

from models.architecture import Architecture

_GEMMA4 = Architecture(
    "models.gemma4:Gemma4",
    "gemma4_text",
    qkv_bias="config",
    has_output_bias=True,
    qk_norm="head",
    norm="olmo2",
    num_layer_norms=4,
    activation="gelu_tanh",
    multipliers="gemma4",
    sliding_layers="pattern_and_last",
    experts="gemma4",
    experts_form="none",
    names={"num_experts_per_tok": "top_k_experts"},
    rope="gemma4",
    layers="gemma4",
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    # "vision": tokens of pictures see later ones; text has none
    neutral={"use_bidirectional_attention": (False, "vision")},
)
# Gemma 4 without towers for pictures and sounds; no layer of its text has an input of its own
_GEMMA4_UNIFIED = dataclasses.replace(
    _GEMMA4,
    model_type="gemma4_unified_text",
    defaults={
        **_GEMMA4.defaults,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)

GEMMA4: dict[str, Architecture] = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "Gemma4ForConditionalGeneration": dataclasses.replace(
        _GEMMA4,
        text_config="text_config",
        body_prefix="model.language_model",
        ignored_prefixes=(
            "model.vision_tower.",
            "model.embed_vision.",
            "model.audio_tower.",
            "model.embed_audio.",
        ),
    ),
    "Gemma4UnifiedForConditionalGeneration": dataclasses.replace(
        _GEMMA4_UNIFIED,
        text_config="text_config",
        body_prefix="model.language_model",
        ignored_prefixes=("model.embed_vision.", "model.vision_embedder.", "model.embed_audio."),
    ),
}
