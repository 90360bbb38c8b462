"""One tiny transformers config for every kind of checkpoint that the models folder serves."""

from __future__ import annotations

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

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


def make_configs() -> dict[str, PreTrainedConfig]:
    """Checkpoint kind → config."""
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
    return configs | _make_small_families() | _make_gemmas() | _make_mixtures()


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


def _make_mixtures() -> dict[str, PreTrainedConfig]:
    tiny = TINY | {"num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return {
        "mixtral": MixtralConfig(**tiny, num_local_experts=4),
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
