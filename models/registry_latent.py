"""LATENT: the rows of models/registry.py whose layers have latent attention (models/config/latent.py)."""

from __future__ import annotations

from models.architecture import Architecture

# What training did, and copies of what the classes fix, in published configs
_HARMLESS = ("aux_loss_alpha", "ep_size", "seq_aux")

LATENT: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(
        "models.deepseek:DeepseekV2",
        "deepseek_v2",
        qkv_bias=False,
        has_mlp_bias=True,
        latent="interleaved",
        experts="deepseek2",
        shared_expert="mlp.shared_experts",
        names={"num_local_experts": "n_routed_experts"},
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
        },
        harmless=_HARMLESS,
        # transformers never divides by the sum, whatever norm_topk_prob says, where the authors' own code does
        neutral={"norm_topk_prob": (False,), "moe_layer_freq": (1,), "rope_interleave": (True,)},
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "models.deepseek:DeepseekV3",
        "deepseek_v3",
        qkv_bias=False,
        latent="interleaved_if_said",
        experts="glm",
        shared_expert="mlp.shared_experts",
        has_draft_layers=True,
        names={"num_local_experts": "n_routed_experts"},
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        harmless=_HARMLESS,
        neutral={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        "models.deepseek:DeepseekV3",
        "glm4_moe_lite",
        qkv_bias=False,
        latent="interleaved_if_said",
        experts="glm_lite",
        shared_expert="mlp.shared_experts",
        has_draft_layers=True,
        names={"num_local_experts": "n_routed_experts"},
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "rope_interleave": True,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        harmless=_HARMLESS,
        neutral={
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
            "first_k_dense_replace": (1,),  # mlp_layer_types says it
        },
    ),
}
