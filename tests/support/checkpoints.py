"""One tiny transformers config for every kind of checkpoint that the models folder serves."""

from __future__ import annotations

import copy
import functools

from transformers import (
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoHybridConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.support.hybrid_checkpoints import make_hybrids
from tests.support.mixture_checkpoints import make_mixtures

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# Every prompt of the tests is longer than this original length, up to several times
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 4,
    "max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
# Every prompt of the tests is longer than this original length, so that transformers takes the long factors for each
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5],
    "long_factor": [1.2, 2.0, 6.0],
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}


def make_config(kind: str) -> PreTrainedConfig:
    """Return the config of a checkpoint kind, which the caller may change."""
    return copy.deepcopy(_configs()[kind])


def make_configs() -> dict[str, PreTrainedConfig]:
    """Checkpoint kind → config, which the caller may change. It copies all: for tests of every kind."""
    return copy.deepcopy(_configs())


@functools.cache  # of so many, each is checked when it is made, and hundreds of tests ask
def _configs() -> dict[str, PreTrainedConfig]:
    configs = {
        "llama2": LlamaConfig(**TINY, num_key_value_heads=4, rope_parameters=DEFAULT_ROPE),
        "llama3.1": LlamaConfig(**TINY, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
        "tinyllama": LlamaConfig(**TINY | {"num_attention_heads": 8}, num_key_value_heads=1),
        "llama_all_biases": LlamaConfig(**TINY, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
        "llama_wide_heads": LlamaConfig(**TINY, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True),
        "linear_rope": LlamaConfig(
            **TINY, num_key_value_heads=2, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        ),
        "dynamic_rope": LlamaConfig(
            **TINY, num_key_value_heads=2, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        ),
        "yarn_rope": LlamaConfig(**TINY, num_key_value_heads=2, rope_parameters=YARN_ROPE),
        "mistral": MistralConfig(**TINY, num_key_value_heads=2, sliding_window=7),
        "mistral_full": MistralConfig(**TINY, num_key_value_heads=2, head_dim=16, sliding_window=None),
        "qwen2": Qwen2Config(**TINY, num_key_value_heads=2),
        "qwen2_windows": Qwen2Config(
            **TINY, num_key_value_heads=2, use_sliding_window=True, sliding_window=6, max_window_layers=1
        ),
        "qwen3": Qwen3Config(**TINY, num_key_value_heads=2, head_dim=24, tie_word_embeddings=True),
        "qwen3_yarn": Qwen3Config(
            **TINY, num_key_value_heads=4, head_dim=8, attention_bias=True, rope_parameters=YARN_ROPE
        ),
    }
    return (
        configs
        | _make_small_families()
        | _make_dense_families()
        | _make_gemmas()
        | _make_gemma4()
        | _make_mixtures()
        | _make_routers()
        | _make_delta_nets()
        | _make_latent()
        | make_hybrids(TINY)
        | make_mixtures(TINY)
    )


def _make_delta_nets() -> dict[str, PreTrainedConfig]:
    layers = TINY | {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    dense = {"mlp_only_layers": [0, 1, 2, 3]}
    olmo = TINY | {"num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": 1}
    return {
        "qwen3_next": Qwen3NextConfig(**layers, **heads, **experts),
        "qwen3_next_dense": Qwen3NextConfig(**layers, **heads, **experts, **dense, attention_bias=True),
        "qwen3_next_steps": Qwen3NextConfig(
            **layers,
            **heads | {"linear_conv_kernel_dim": 2},
            **experts,
            decoder_sparse_step=2,
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        ),
        "qwen3_5": Qwen3_5TextConfig(**layers, **heads | {"linear_value_head_dim": 16}, tie_word_embeddings=True),
        "qwen3_5_moe": Qwen3_5MoeTextConfig(
            **{name: value for name, value in layers.items() if name != "intermediate_size"}, **heads, **experts
        ),
        "olmo_hybrid": OlmoHybridConfig(**olmo, **heads, rope_parameters={"rope_theta": None, "rope_type": "default"}),
        "olmo_hybrid_rope": OlmoHybridConfig(
            **olmo, linear_allow_neg_eigval=False, attention_bias=True, rope_parameters=DEFAULT_ROPE
        ),
    }


def _make_latent() -> dict[str, PreTrainedConfig]:
    """Latent attention; no size of a head is that of another part."""
    tiny = TINY | {"num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    sizes = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    some = {"first_k_dense_replace": 1}
    mscale = {"mscale": 0.7, "mscale_all_dim": 1.3}
    return {
        "deepseek_v2_lite": DeepseekV2Config(
            **tiny,
            **sizes | {"q_lora_rank": None},
            **experts,
            **some,
            rope_parameters=YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        "deepseek_v2": DeepseekV2Config(
            **tiny,
            **sizes,
            **experts,
            **some,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.6,
            attention_bias=True,
            mlp_bias=True,
        ),
        "deepseek_v3": DeepseekV3Config(
            **tiny, **sizes, **experts, **some, n_group=4, topk_group=2, rope_parameters=YARN_ROPE | mscale
        ),
        "deepseek_v3_halves": DeepseekV3Config(
            **tiny,
            **sizes | {"q_lora_rank": None},
            **experts,
            first_k_dense_replace=0,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            rope_interleave=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        "glm4_moe_lite": Glm4MoeLiteConfig(**tiny, **sizes, **experts, rope_parameters=DEFAULT_ROPE),
        "glm4_moe_lite_listed": Glm4MoeLiteConfig(
            **tiny, **sizes, **experts, mlp_layer_types=["sparse", "dense", "sparse"]
        ),
    }


def _make_small_families() -> dict[str, PreTrainedConfig]:
    multipliers = {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.3,
    }
    return {
        "mistral_nemo": MistralConfig(**TINY | {"hidden_size": 40}, num_key_value_heads=1, head_dim=16),
        "ministral3": Ministral3Config(**TINY, num_key_value_heads=2, head_dim=12, rope_parameters=MINISTRAL3_ROPE),
        "ministral3_windows": Ministral3Config(
            **TINY,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=9,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT_ROPE | {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.1},
        ),
        "smollm3": SmolLM3Config(
            **TINY, num_key_value_heads=2, no_rope_layer_interval=2, pad_token_id=None, rope_parameters=DEFAULT_ROPE
        ),
        "smollm3_windows": SmolLM3Config(
            **TINY,
            num_key_value_heads=2,
            no_rope_layers=[0, 1, 1],
            use_sliding_window=True,
            sliding_window=5,
            attention_bias=True,
            mlp_bias=True,
            pad_token_id=None,
        ),
        "phi3": Phi3Config(**TINY, num_key_value_heads=2, sliding_window=7, pad_token_id=None),
        "phi3_long": Phi3Config(
            **TINY,
            num_key_value_heads=1,
            original_max_position_embeddings=2,
            rope_parameters=LONG_ROPE | {"partial_rotary_factor": 0.75},
            tie_word_embeddings=True,
            pad_token_id=None,
        ),
        "granite": GraniteConfig(**TINY, num_key_value_heads=2, **multipliers),
        "granite_biases": GraniteConfig(
            **TINY,
            num_key_value_heads=4,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            **multipliers | {"residual_multiplier": 1},
        ),
        "olmo2": Olmo2Config(**TINY, num_key_value_heads=2, rope_parameters=DEFAULT_ROPE, pad_token_id=None),
        "olmo2_biases": Olmo2Config(**TINY, num_key_value_heads=4, attention_bias=True, pad_token_id=None),
    }


def _make_dense_families() -> dict[str, PreTrainedConfig]:
    """Dense families with a layer, rotary positions or an activation of their own."""
    tiny = TINY | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "seed_oss": SeedOssConfig(**tiny, head_dim=12),
        "seed_oss_biases": SeedOssConfig(
            **tiny, head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True
        ),
        "arcee": ArceeConfig(**tiny, rope_parameters=YARN_ROPE),
        "arcee_biases": ArceeConfig(**tiny, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "apertus": ApertusConfig(**tiny, rope_parameters=LLAMA3_ROPE),
        "apertus_biases": ApertusConfig(**tiny, attention_bias=True, rope_parameters=DEFAULT_ROPE),
        "ernie4_5": Ernie4_5Config(**tiny, head_dim=12, rope_parameters=DEFAULT_ROPE),
        "ernie4_5_biases": Ernie4_5Config(**tiny, head_dim=8, use_bias=True, tie_word_embeddings=False),
        "glm4": Glm4Config(**tiny, head_dim=12, rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.5}),
        "glm4_whole_heads": Glm4Config(
            **tiny, head_dim=8, attention_bias=False, rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 1.0}
        ),
        "hunyuan": HunYuanDenseV1Config(
            **tiny,
            head_dim=12,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 1.0, "alpha": 8.0},
        ),
        "hunyuan_biases": HunYuanDenseV1Config(**tiny, head_dim=8, attention_bias=True, tie_word_embeddings=True),
        "olmo3": Olmo3Config(
            **tiny,
            layer_types=kinds,
            sliding_window=6,
            rope_parameters={"full_attention": YARN_ROPE, "sliding_attention": DEFAULT_ROPE},
        ),
        "olmo3_biases": Olmo3Config(**tiny, sliding_window=9, attention_bias=True),
        "exaone4": Exaone4Config(**tiny, layer_types=kinds, sliding_window=6, rope_parameters=DEFAULT_ROPE),
        "exaone4_full": Exaone4Config(**tiny, layer_types=["full_attention"] * 3, sliding_window=None),
        "cohere2": Cohere2Config(**tiny, layer_types=kinds, sliding_window=6, logit_scale=1.3),
        "cohere2_biases": Cohere2Config(
            **tiny,
            sliding_window=9,
            attention_bias=True,
            tie_word_embeddings=False,
            logit_scale=0.7,
            rope_parameters=DEFAULT_ROPE,
        ),
        "ministral": MinistralConfig(
            **tiny, head_dim=8, layer_types=kinds, sliding_window=6, rope_parameters=DEFAULT_ROPE
        ),
        "ministral_windows": MinistralConfig(**tiny, head_dim=16, sliding_window=9, tie_word_embeddings=True),
    }


def _make_gemmas() -> dict[str, PreTrainedConfig]:
    tiny = TINY | {"num_key_value_heads": 2, "head_dim": 12}
    return {
        "gemma": GemmaConfig(**tiny | {"num_key_value_heads": 1}, hidden_act="gelu"),
        "gemma2": Gemma2Config(
            **tiny,
            query_pre_attn_scalar=20,
            sliding_window=6,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=4.0,
        ),
        "gemma2_uncapped": Gemma2Config(
            **tiny,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
            sliding_window=6,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "gemma3": Gemma3TextConfig(**tiny, query_pre_attn_scalar=20, sliding_window=6, sliding_window_pattern=2),
        "gemma3_linear": Gemma3TextConfig(
            **tiny,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            final_logit_softcapping=5.0,
        ),
    }


def _make_gemma4() -> dict[str, PreTrainedConfig]:
    tiny = TINY | {
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "global_head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 97,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
        },
        "pad_token_id": None,
    }
    return {
        "gemma4": Gemma4TextConfig(
            **tiny,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            tie_word_embeddings=False,
            final_logit_softcapping=5.0,
        ),
        "gemma4_unified": Gemma4UnifiedTextConfig(
            **{name: value for name, value in tiny.items() if name != "vocab_size_per_layer_input"},
            tie_word_embeddings=False,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            final_logit_softcapping=5.0,
        ),
        "gemma4_shared": Gemma4TextConfig(
            **tiny,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=6,
        ),
        "gemma4_experts": Gemma4TextConfig(
            **tiny,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            tie_word_embeddings=False,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=24,
        ),
    }


def _make_mixtures() -> dict[str, PreTrainedConfig]:
    tiny = TINY | {"num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return {
        "mixtral": MixtralConfig(**tiny, num_local_experts=4),
        "gpt_oss": GptOssConfig(
            **tiny,
            head_dim=12,
            sliding_window=6,
            num_local_experts=8,
            num_experts_per_tok=3,
            swiglu_limit=0.5,
            rope_parameters=YARN_ROPE | {"truncate": False},
        ),
        "mixtral_windows": MixtralConfig(**tiny, num_local_experts=5, num_experts_per_tok=3, sliding_window=7),
        "qwen2_moe": Qwen2MoeConfig(**tiny, **experts, shared_expert_intermediate_size=40, mlp_only_layers=[1]),
        "qwen2_moe_windows": Qwen2MoeConfig(
            **tiny,
            **experts,
            shared_expert_intermediate_size=16,
            norm_topk_prob=True,
            qkv_bias=False,
            use_sliding_window=True,
            sliding_window=6,
        ),
        "qwen3_moe": Qwen3MoeConfig(**tiny, **experts, head_dim=24, norm_topk_prob=True),
        "qwen3_moe_steps": Qwen3MoeConfig(
            **tiny,
            **experts,
            head_dim=16,
            decoder_sparse_step=2,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            tie_word_embeddings=True,
        ),
    }


def _make_routers() -> dict[str, PreTrainedConfig]:
    """Mixtures of experts with a router, a shared expert or names of their own."""
    tiny = TINY | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    few = {"num_local_experts": 6, "num_experts_per_tok": 3}
    multipliers = {"attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 1.3}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    ernie = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "head_dim": 12}
    glm = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    even = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 1.1, 1.3, 2.0]}
    return {
        "granite_moe": GraniteMoeConfig(**tiny, **few, **multipliers, embedding_multiplier=3.0),
        "granite_moe_biases": GraniteMoeConfig(**tiny, **few, attention_bias=True, tie_word_embeddings=True),
        "granite_moe_shared": GraniteMoeSharedConfig(**tiny, **few, **multipliers, shared_intermediate_size=40),
        "phimoe": PhimoeConfig(
            **tiny,
            num_local_experts=6,
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.2,
            rope_parameters=LONG_ROPE
            | even
            | {"original_max_position_embeddings": 2, "short_mscale": 1.1, "long_mscale": 1.2},
        ),
        "phimoe_windows": PhimoeConfig(**tiny, num_local_experts=5, sliding_window=7, router_jitter_noise=0.01),
        "ernie4_5_moe": Ernie4_5_MoeConfig(**tiny, **ernie, moe_num_shared_experts=2, use_bias=False),
        "ernie4_5_moe_steps": Ernie4_5_MoeConfig(
            **tiny, **ernie, moe_num_shared_experts=0, moe_layer_start_index=0, moe_layer_interval=2, use_bias=True
        ),
        "hunyuan_moe": HunYuanMoEV1Config(
            **tiny,
            head_dim=12,
            num_experts=6,
            moe_topk=3,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 1.0, "alpha": 8.0},
        ),
        "hunyuan_moe_biases": HunYuanMoEV1Config(
            **tiny, head_dim=8, num_experts=5, moe_topk=1, attention_bias=True, tie_word_embeddings=True
        ),
        "mellum": MellumConfig(
            **tiny,
            head_dim=12,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            layer_types=kinds,
            sliding_window=6,
            mlp_layer_types=["dense", "sparse", "sparse"],
            rope_parameters={"full_attention": YARN_ROPE, "sliding_attention": DEFAULT_ROPE},
        ),
        "mellum_full": MellumConfig(
            **tiny, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False
        ),
        "glm4_moe": Glm4MoeConfig(**tiny, **glm, attention_bias=True, use_qk_norm=True, routed_scaling_factor=1.5),
        "glm4_moe_groups": Glm4MoeConfig(
            **tiny, **glm | {"first_k_dense_replace": 0}, n_group=4, topk_group=2, norm_topk_prob=False, head_dim=12
        ),
        "llama4": Llama4TextConfig(
            **tiny,
            head_dim=12,
            intermediate_size_mlp=40,
            num_local_experts=6,
            no_rope_layers=[1, 0, 1],
            interleave_moe_layer_step=2,
            attention_chunk_size=10,
            floor_scale=5,
            attn_scale=0.3,
            rope_parameters=LLAMA3_ROPE,
        ),
        "llama4_no_norm": Llama4TextConfig(
            **tiny,
            head_dim=8,
            intermediate_size_mlp=40,
            num_local_experts=5,
            num_experts_per_tok=2,
            no_rope_layer_interval=2,
            moe_layers=[0, 1, 2],
            use_qk_norm=False,
            attention_bias=True,
            attn_temperature_tuning=False,
            attention_chunk_size=32,
            tie_word_embeddings=True,
            rope_parameters=DEFAULT_ROPE,
        ),
    }
