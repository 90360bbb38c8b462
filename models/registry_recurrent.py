"""RECURRENT: the rows of models/registry.py with layers that keep a state of each request."""

from __future__ import annotations

from dataclasses import replace

from models.architecture import Architecture

_QWEN_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_EXPERTS_DEFAULTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_QWEN3_NEXT = Architecture(
    "models.qwen3_next:Qwen3Next",
    "qwen3_next",
    qkv_bias="config",
    has_output_bias=True,
    qk_norm="head",
    norm="gemma",
    rope="glm",
    experts="qwen2",
    recurrence="qwen3_next",
    has_output_gate=True,
    # of the layers that guess further tokens, whose weights are not read
    harmless=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers"),
    neutral={
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),  # of the delta rule's outputs; that of attention is always a sigmoid
        "mamba_ssm_dtype": ("float32",),
    },
    ignored_prefixes=("mtp.",),
    defaults={
        **_QWEN_DEFAULTS,
        **_EXPERTS_DEFAULTS,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    model_type="qwen3_5_text",
    recurrence="qwen3_5",
    experts="none",
    defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 4},
)
_QWEN3_5_MOE = replace(
    _QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    recurrence="qwen3_5",
    experts="qwen3_5",
    names={"intermediate_size": "moe_intermediate_size"},  # no layer has a dense MLP
    harmless=(*_QWEN3_NEXT.harmless, "intermediate_size"),
    defaults={**_QWEN_DEFAULTS, **_EXPERTS_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
)


def _text_part_of(architecture: Architecture) -> Architecture:
    """Return the row of the model for text and pictures with this text part."""
    return replace(
        architecture,
        text_config="text_config",
        body_prefix="model.language_model",
        ignored_prefixes=("mtp.", "model.visual."),
    )


RECURRENT: dict[str, Architecture] = {
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _text_part_of(_QWEN3_5),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _text_part_of(_QWEN3_5_MOE),
    "OlmoHybridForCausalLM": Architecture(
        "models.olmo_hybrid:OlmoHybrid",
        "olmo_hybrid",
        qkv_bias="config",
        has_output_bias=True,
        qk_norm="width",
        norm="olmo2",
        rope="olmo_hybrid",
        recurrence="olmo_hybrid",
        # of the weights' first values
        harmless=(
            "linear_a_log_min",
            "linear_a_log_max",
            "linear_dt_min",
            "linear_dt_max",
            "linear_dt_init_floor",
        ),
    ),
}
