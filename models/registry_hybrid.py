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

# Settings of kernels and of the training
_MAMBA_HARMLESS = (
    "mamba_chunk_size",
    "num_logits_to_keep",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "use_mamba_kernels",
)
_GRANITE = Architecture(
    "models.granite_hybrid:GraniteHybrid",
    "granitemoehybrid",
    qkv_bias="config",
    has_output_bias=True,
    multipliers="granite",
    recurrence="granite",
    experts="granite",
    expert="block_sparse_moe.input_linear",
    shared_expert="shared_mlp",
    mlp="shared_mlp",
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    packed_modules={"gate_proj": "input_linear", "up_proj": "input_linear", "down_proj": "output_linear"},
    harmless=(*_MAMBA_HARMLESS, "init_method"),
    neutral={"normalization_function": ("rmsnorm",)},
)
_BAMBA = Architecture(
    "models.bamba:Bamba",
    "bamba",
    qkv_bias="config",
    has_output_bias=True,
    has_mlp_bias=True,
    recurrence="bamba",
    rope="glm",
    mlp="feed_forward",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    # attn_rotary_emb: the rotated dimensions, which the class fixes
    harmless=(*_MAMBA_HARMLESS, "z_loss_coefficient", "attn_rotary_emb"),
    neutral={"partial_rotary_factor": (0.5,)},
)
_FALCON = Architecture(
    "models.falcon_h1:FalconH1",
    "falcon_h1",
    qkv_bias="config",
    has_output_bias=True,
    has_mlp_bias=True,
    multipliers="falcon",
    recurrence="falcon",
    mlp="feed_forward",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024},
    # what the class fixes, in published configs
    harmless=(*_MAMBA_HARMLESS, "attn_layer_indices", "mamba_expand", "mlp_expansion_factor"),
    neutral={"mamba_use_mlp": (True,)},
)
_NEMOTRON = Architecture(
    "models.nemotron_h:NemotronH",
    "nemotron_h",
    qkv_bias=False,
    has_mlp_bias=True,
    norm="olmo2",
    num_layer_norms=1,
    activation="relu2",
    recurrence="nemotron",
    experts="nemotron",
    expert="mixer.experts.0.up_proj",
    shared_expert="mixer.shared_experts",
    mlp="mixer",
    attention="mixer",
    body_prefix="backbone",
    names={
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "mlp_hidden_act",
        "num_local_experts": "n_routed_experts",
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    # of the training, of kernels, of layers that guess further tokens, and copies of other fields
    harmless=(
        *_MAMBA_HARMLESS,
        "attention_bias",
        "attention_head_dim",
        "chunk_size",
        "expand",
        "mamba_dt_init_floor",
        "mamba_dt_max",
        "mamba_dt_min",
        "mamba_expand",
        "mamba_proj_bias",
        "mamba_ssm_cache_dtype",
        "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
        "num_nextn_predict_layers",
        "rescale_prenorm_residual",
        "sliding_window",
    ),
    neutral={
        "mamba_hidden_act": ("silu", "swish"),
        "n_shared_experts": (1,),
        "residual_in_fp32": (False,),
    },
    ignored_prefixes=("mtp.",),
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
    "GraniteMoeHybridForCausalLM": _GRANITE,
    "BambaForCausalLM": _BAMBA,
    "FalconH1ForCausalLM": _FALCON,
    "NemotronHForCausalLM": _NEMOTRON,
}
