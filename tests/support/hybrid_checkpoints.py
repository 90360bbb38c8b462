"""Tiny transformers configs of models with short convolutions, Mamba-2 layers and Kimi delta attention."""

from __future__ import annotations

from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    PreTrainedConfig,
)


def make_hybrids(tiny: dict[str, int]) -> dict[str, PreTrainedConfig]:
    """Checkpoint kind → config. tiny: the usual sizes."""
    return _make_short_convs(tiny) | _make_mambas(tiny) | _make_nemotrons(tiny) | _make_kimis(tiny)


def _make_short_convs(tiny: dict[str, int]) -> dict[str, PreTrainedConfig]:
    conv = {"num_hidden_layers": 4, "num_key_value_heads": 2, "block_multiple_of": 8}
    return {
        "lfm2": Lfm2Config(**tiny | conv, full_attn_idxs=[1, 3], block_ffn_dim_multiplier=1.1),
        "lfm2_biases": Lfm2Config(
            **tiny | conv,
            layer_types=["full_attention", "conv", "conv", "full_attention"],
            conv_bias=True,
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
        ),
        "lfm2_moe": Lfm2MoeConfig(
            **tiny | {"num_hidden_layers": 4},
            num_key_value_heads=2,
            layer_types=["conv", "conv", "full_attention", "conv"],
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            num_dense_layers=1,
            routed_scaling_factor=1.5,
        ),
        "lfm2_moe_unbiased": Lfm2MoeConfig(
            **tiny | {"num_hidden_layers": 3},
            num_key_value_heads=4,
            layer_types=["conv", "full_attention", "conv"],
            num_experts=4,
            num_experts_per_tok=1,
            moe_intermediate_size=24,
            num_dense_layers=0,
            use_expert_bias=False,
            norm_topk_prob=False,
            conv_L_cache=2,
        ),
    }


def _make_mambas(tiny: dict[str, int]) -> dict[str, PreTrainedConfig]:
    tiny = tiny | {"num_hidden_layers": 4, "num_key_value_heads": 2}
    mamba = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    multipliers = {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.3,
    }
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40}
    return {
        "granite_hybrid": GraniteMoeHybridConfig(
            **tiny, **mamba, **multipliers, **experts, layer_types=kinds, position_embedding_type="nope"
        ),
        "granite_hybrid_dense": GraniteMoeHybridConfig(
            **tiny,
            **mamba | {"mamba_n_groups": 2},
            layer_types=kinds,
            num_local_experts=0,
            shared_intermediate_size=40,
            position_embedding_type="rope",
            mamba_proj_bias=True,
            attention_bias=True,
            time_step_limit=(0.02, 0.9),
            tie_word_embeddings=True,
        ),
        "bamba": BambaConfig(**tiny, **mamba, attn_layer_indices=[1, 2]),
        "bamba_biases": BambaConfig(
            **tiny,
            **mamba | {"mamba_n_groups": 4},
            attn_layer_indices=[3],
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            attention_bias=True,
            mlp_bias=True,
        ),
        "falcon_h1": FalconH1Config(
            **tiny,
            **mamba,
            mamba_d_ssm=48,
            key_multiplier=0.7,
            embedding_multiplier=2.3,
            lm_head_multiplier=0.7,
            attention_in_multiplier=1.1,
            attention_out_multiplier=0.9,
            ssm_in_multiplier=1.2,
            ssm_out_multiplier=0.8,
            ssm_multipliers=[0.9, 0.8, 1.1, 1.2, 0.7],
            mlp_multipliers=[0.8, 1.3],
        ),
        "falcon_h1_norm": FalconH1Config(
            **tiny, **mamba | {"mamba_n_groups": 2}, mamba_d_ssm=64, mamba_rms_norm=True, mamba_norm_before_gate=False
        ),
        "falcon_h1_norm_first": FalconH1Config(
            **tiny,
            **mamba,
            mamba_d_ssm=None,
            mamba_rms_norm=True,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
        ),
    }


def _make_nemotrons(tiny: dict[str, int]) -> dict[str, PreTrainedConfig]:
    tiny = {name: size for name, size in tiny.items() if name != "num_hidden_layers"}
    # time_step_min: transformers' class limits the steps of a prompt by it, and not those of decoding
    tiny |= {"num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8}
    mamba = {"n_groups": 2, "chunk_size": 16, "time_step_min": 1e-9}
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 2.5,
    }
    return {
        "nemotron_h": NemotronHConfig(**tiny, **mamba, hybrid_override_pattern="M-M*-"),
        "nemotron_h_biases": NemotronHConfig(
            **tiny, **mamba | {"n_groups": 1}, hybrid_override_pattern="*-M-", use_bias=True, mlp_bias=True
        ),
        "nemotron_3": NemotronHConfig(**tiny, **mamba, **experts, hybrid_override_pattern="MEM*E"),
        "nemotron_3_latent": NemotronHConfig(
            **tiny,
            **mamba,
            **experts | {"n_group": 2, "topk_group": 1},
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            moe_latent_size=16,
            mlp_bias=True,
            norm_topk_prob=False,
        ),
    }


def _make_kimis(tiny: dict[str, int]) -> dict[str, PreTrainedConfig]:
    """No size of a head is that of another part; layers are listed as published files list them, or as new ones do."""
    tiny = tiny | {"num_hidden_layers": 4, "num_key_value_heads": 4}
    latent = {"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    listed = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "head_dim": 16, "num_heads": 4}
    return {
        "kimi_linear": KimiLinearConfig(
            **tiny, **latent, **experts, **ids, linear_attn_config=listed | {"short_conv_kernel_size": 4}
        ),
        "kimi_linear_groups": KimiLinearConfig(
            **tiny,
            **latent,
            **experts,
            **ids,
            q_lora_rank=20,
            attention_bias=True,
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
            linear_head_dim=12,
            linear_num_heads=8,
            linear_conv_kernel_dim=2,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            n_shared_experts=2,
        ),
    }
