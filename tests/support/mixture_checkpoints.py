"""Tiny transformers configs of mixtures of experts of 2025 and 2026; see tests/support/checkpoints.py."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    Cohere2MoeConfig,
    Dots1Config,
    ExaoneMoeConfig,
    MiniMaxM2Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    SolarOpenConfig,
)

SLIDING, FULL = "sliding_attention", "full_attention"


def make_mixtures(tiny: dict[str, Any]) -> dict[str, PreTrainedConfig]:
    """Checkpoint kind → config. tiny: the sizes of all."""
    tiny = tiny | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    kinds = [SLIDING, FULL, SLIDING]
    experts = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
    dots = experts | {"n_routed_experts": 8, "first_k_dense_replace": 1}
    exaone = experts | {"num_experts": 8, "layer_types": kinds}
    cohere = {"num_experts": 8, "num_experts_per_tok": 3}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    solar = {name: value for name, value in tiny.items() if name != "intermediate_size"}
    solar |= experts | {"n_routed_experts": 8}
    return {
        "minimax_m2": MiniMaxM2Config(
            **tiny,
            head_dim=12,
            num_local_experts=8,
            num_experts_per_tok=3,
            rope_parameters=rope | {"partial_rotary_factor": 0.5},
        ),
        "minimax_m2_rotary_dim": MiniMaxM2Config(
            **tiny | {"num_key_value_heads": 1}, head_dim=16, rotary_dim=6, num_local_experts=5, num_experts_per_tok=2
        ),
        "dots1": Dots1Config(
            **tiny, **dots, n_shared_experts=2, norm_topk_prob=True, routed_scaling_factor=1.5, sliding_window=None
        ),
        "dots1_windows": Dots1Config(
            **tiny,
            **dots | {"first_k_dense_replace": 0},
            n_shared_experts=1,
            routed_scaling_factor=2.0,
            n_group=4,
            topk_group=2,
            attention_bias=True,
            sliding_window=6,
            max_window_layers=1,
            rope_parameters=rope,
        ),
        "exaone_moe": ExaoneMoeConfig(**tiny, **exaone, head_dim=12, sliding_window=6, rope_parameters=rope),
        "exaone_moe_no_rope": ExaoneMoeConfig(
            **tiny,
            **exaone | {"layer_types": [FULL] * 3},
            sliding_window=9,
            mlp_layer_types=["sparse", "dense", "sparse"],
            num_shared_experts=2,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
        "cohere2_moe": Cohere2MoeConfig(
            **tiny,
            **cohere,
            head_dim=12,
            layer_types=kinds,
            sliding_window=6,
            num_shared_experts=2,
            expert_selection_fn="sigmoid",
            logit_scale=1.3,
        ),
        "cohere2_moe_prefix": Cohere2MoeConfig(
            **tiny | {"num_hidden_layers": 4},
            **cohere,
            head_dim=8,
            sliding_window=9,
            sliding_window_pattern=2,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=40,
            rms_norm_eps=1e-5,
            expert_selection_fn="sigmoid",
            norm_topk_prob=False,
            tie_word_embeddings=False,
            logit_scale=0.7,
        ),
        "cohere2_moe_softmax": Cohere2MoeConfig(
            **tiny,
            **cohere,
            head_dim=8,
            sliding_window=9,
            num_shared_experts=1,
            shared_expert_combination_strategy="sum",
            mlp_layer_types=["dense", "sparse", "dense"],
            prefix_dense_sliding_window_pattern=2,
            attention_bias=True,
            logit_scale=1.1,
        ),
        "solar_open": SolarOpenConfig(**solar, head_dim=12, attention_bias=True, rope_parameters=rope),
        "solar_open_groups": SolarOpenConfig(
            **solar, head_dim=16, n_group=4, topk_group=2, norm_topk_prob=False, routed_scaling_factor=2.0
        ),
        **_make_mistral4(tiny),
    }


def _make_mistral4(tiny: dict[str, Any]) -> dict[str, PreTrainedConfig]:
    """Every prompt of the tests is longer than the original length, up to several times."""
    # transformers has the class, but does not choose it by its config
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    tiny = tiny | {"num_key_value_heads": 4}
    sizes = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 4,
        "max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    }
    return {
        "mistral4": Mistral4Config(**tiny, **sizes, **experts, rope_parameters=rope),
        "mistral4_groups": Mistral4Config(
            **tiny,
            **sizes | {"q_lora_rank": None},
            **experts,
            first_k_dense_replace=1,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            attention_bias=True,
            rope_interleave=False,
            tie_word_embeddings=True,
            rope_parameters=rope | {"mscale_all_dim": 0.7},
        ),
    }
