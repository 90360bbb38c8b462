"""RECURRENT: the rows of models/registry.py with layers that keep a state of each request."""

from __future__ import annotations

from models.architecture import Architecture

# Fields of the layers that guess further tokens, whose weights are not read
_DRAFTS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers")
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
    harmless=_DRAFTS,
    ignored_prefixes=("mtp.",),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
)

RECURRENT: dict[str, Architecture] = {
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
}
