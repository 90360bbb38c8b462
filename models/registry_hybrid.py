"""HYBRIDS: the rows of models/registry.py with recurrent layers beside those with attention."""

from __future__ import annotations

from dataclasses import replace

from models.architecture import Architecture

_LFM2 = Architecture(
    "models.lfm2:Lfm2",
    "lfm2",
    qkv_bias=False,
    qk_norm="head",
    recurrence="lfm2",
    mlp="feed_forward",
    names={"rms_norm_eps": "norm_eps"},
    defaults={
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128_000,
    },
    packed_modules={"o_proj": "out_proj", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    # settings of the training, and copies of other fields in published configs
    harmless=(
        "block_dim",
        "block_mlp_init_scale",
        "block_norm_eps",
        "block_out_init_scale",
        "block_use_xavier_init",
        "conv_dim",
        "conv_dim_out",
        "conv_use_xavier_init",
        "num_heads",
    ),
    neutral={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
)

HYBRIDS: dict[str, Architecture] = {
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        model_type="lfm2_moe",
        experts="lfm2",
        expert="feed_forward.experts.0.w1",
        defaults={
            **_LFM2.defaults,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
        },
    ),
}
